// Server-sent events out of the text of a response, however it is cut into pieces.

export class EventParser {
  constructor() {
    this.rest = "";
    this.fresh();
  }

  fresh() {
    this.name = "message";
    this.data = [];
  }

  /** The events that are complete with this text. */
  feed(text) {
    const all = this.rest + text;
    // "\r" at the end may be half of "\r\n": it waits for what follows
    const end = all.endsWith("\r") ? all.length - 1 : all.length;
    const lines = all.slice(0, end).split(/\r\n|\n|\r/);
    this.rest = lines.pop() + all.slice(end);
    const events = [];
    for (const line of lines) {
      if (line !== "") this.take(line);
      else if (this.data.length) {
        events.push({ name: this.name, data: this.data.join("\n") });
        this.fresh();
      } else this.fresh();
    }
    return events;
  }

  take(line) {
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment: it only keeps the connection awake
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") this.name = value;
    if (field === "data") this.data.push(value);
  }
}
