// Results so far, newest first: each with all that is needed to go back to it.

import { thumbnail } from "./picture.js";

const KEPT = 30;
const SIDE = 144;

export class History extends EventTarget {
  constructor(section, list) {
    super();
    this.section = section;
    this.list = list;
    this.entries = [];
    this.added = 0;
    this.current = null;
  }

  /** An entry has: picture, mask, values, facts, and the result's file: a bitmap takes more. */
  add(entry, result) {
    const button = document.createElement("button");
    button.type = "button";
    button.title = entry.values.prompt;
    this.added += 1;
    button.setAttribute("aria-label", `Result ${this.added}: ${entry.values.prompt}`);
    button.append(thumbnail(result, SIDE));
    button.addEventListener("click", () => this.choose(entry));
    const item = document.createElement("li");
    item.append(button);
    this.list.prepend(item);
    Object.assign(entry, { button });
    this.entries.push(entry);
    if (this.entries.length > KEPT) this.entries.shift().button.parentElement.remove();
    this.section.hidden = false;
    this.mark(entry);
  }

  choose(entry) {
    this.mark(entry);
    this.dispatchEvent(new CustomEvent("choose", { detail: entry }));
  }

  mark(entry) {
    this.current = entry;
    for (const { button } of this.entries) button.removeAttribute("aria-current");
    entry?.button.setAttribute("aria-current", "true");
  }
}
