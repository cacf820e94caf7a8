// What the page says: facts, progress, results, troubles; on the screen and to screen readers.

const $ = (id) => document.getElementById(id);
const REST = 500; // milliseconds: what moves is read out once it rests

const count = (number) => number.toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
const seconds = (time) => `${time < 10 ? time.toFixed(2) : time.toFixed(1)} s`;

export class Report {
  constructor() {
    this.timer = null;
    this.unread = new Map(); // the latest text of each topic, to be read out together
  }

  server(text) {
    $("model-name").textContent = text;
  }

  say(text) {
    $("status").textContent = text;
  }

  /** For screen readers alone: a topic's later text takes the place of its earlier one. */
  whisper(topic, text) {
    this.unread.set(topic, text);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      $("said").textContent = [...this.unread.values()].join(". ");
      this.unread.clear();
    }, REST);
  }

  sites({ width, height, name }, { count: painted }, { active, cells, share }) {
    $("picture-facts").textContent = `${name} · ${width} × ${height}`;
    const text = painted
      ? `${percent(share)} of the sites are active: ${count(active)} of ${count(cells.length)}`
      : "Nothing is painted yet";
    $("site-facts").textContent = text;
    this.whisper("sites", text);
  }

  cursor({ x, y }, mask) {
    const column = Math.min(mask.width - 1, Math.floor(x));
    const row = Math.min(mask.height - 1, Math.floor(y));
    const painted = mask.bits[row * mask.width + column] ? "painted" : "not painted";
    this.whisper("cursor", `${Math.round(x)} across, ${Math.round(y)} down, ${painted}`);
  }

  note(text, offersScaling) {
    $("note").hidden = !text && !offersScaling;
    $("note-text").textContent = text || "Larger than what the model was made for.";
    $("scale-to-model").hidden = !offersScaling;
    $("scale-to-model").textContent = "Scale to the model’s size";
  }

  /** So many previews are there, after the first of which `what` isn't said; null: no run. */
  progress(done, previews, what) {
    $("progress").hidden = done === null;
    if (done === null) return this.say("");
    $("progress").setAttribute("aria-valuemax", String(previews + 1));
    $("progress").setAttribute("aria-valuenow", String(done));
    $("progress").firstElementChild.style.width = `${(100 * (done + 0.5)) / (previews + 1)}%`;
    return this.say(done ? `Preview ${done} of ${previews}` : what);
  }

  done({ facts, picture }) {
    const done = facts.seconds === undefined ? "Done." : `Done in ${seconds(facts.seconds)}.`;
    this.say(picture ? done : `${done} Paint what should change next.`);
  }

  /** The numbers of a result; null: there is none. */
  result(entry) {
    $("result").hidden = !entry;
    if (!entry) return;
    const { seconds: time, queued = 0, steps, mask_ratio: ratio, seed } = entry.facts;
    const dense = entry.facts.dense_seconds;
    const work = time - queued; // a queue says nothing of the mask
    const masked = Boolean(entry.picture); // and not made from text
    const compared = masked && dense && work > 0;
    $("edit-result").hidden = !masked;
    $("speed").hidden = !compared;
    if (compared) {
      $("speed-value").textContent = `${(dense / work).toFixed(1)}×`;
      $("speed-unit").textContent = "as fast as computing the whole picture";
    }
    const rows = [
      ["Time", time, seconds],
      ["Whole picture", masked ? dense : null, (value) => `${seconds(value)} predicted`],
      ["Waited", queued || null, seconds],
      ["Sites computed", masked ? ratio : null, percent],
      ["Steps", steps, String],
    ].filter(([, value]) => value !== undefined && value !== null);
    const written = rows.flatMap(([name, value, write]) => row(name, write(value)));
    $("numbers").replaceChildren(...written);
    if (seed !== undefined) $("numbers").append(...row("Seed", seedButton(seed)));
  }

  /** Says what went wrong; placed: its message stands at the field already. */
  trouble(failure, placed = false) {
    $("trouble").hidden = false;
    $("trouble-text").textContent = placed ? "One field needs another value." : failure.message;
    const parts = [
      failure.param && `field ${failure.param}`,
      failure.code,
      failure.after && `the server asks to wait ${Math.ceil(failure.after)} s`,
      failure.id && `request ${failure.id}`,
    ];
    $("trouble-code").textContent = parts.filter(Boolean).join(" · ");
    $("again").hidden = failure.status === undefined || placed;
  }

  clear() {
    $("trouble").hidden = true;
    this.say("");
  }
}

function row(name, value) {
  const term = document.createElement("dt");
  const detail = document.createElement("dd");
  term.textContent = name;
  detail.append(value);
  return [term, detail];
}

function seedButton(seed) {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", className: "link", textContent: String(seed) });
  button.dataset.seed = String(seed);
  button.title = "Use this seed again";
  button.setAttribute("aria-label", `Use seed ${seed} again`);
  return button;
}
