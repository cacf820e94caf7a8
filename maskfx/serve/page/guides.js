// The pictures that guide a run: one for each ControlNet or T2I-Adapter, one for each IP-Adapter.
// A row's picture is a file, or the edges of whichever picture is edited.

import { edgesOf } from "./edges.js";
import { decode, pngOf, prepare, thumbnail } from "./picture.js";

const SIDE = 144; // pixels of a thumbnail, which is shown at half of that
const EDGES = "edges"; // in place of a file
const FIELDS = {
  control: ["control_image", "controlnet", "controlnet_conditioning_scale", "control_mode"],
  ip: ["ip_adapter_image", "ip_adapter", "ip_adapter_scale"],
};

export class Guides {
  constructor(section, list, template) {
    Object.assign(this, { section, list, template, rows: [], picture: null });
  }

  /** Shows a row for each picture that a model takes; what a row of this name had stays. */
  suit(card) {
    const takes = new Set(card.takes ?? []);
    const nets = takes.has("control") ? (card.controlnets ?? []) : [];
    const controls = takes.has("control") ? Math.max(nets.length, card.controls ?? 1) : 0;
    this.named = nets.length === controls; // else pictures aren't one per net
    const before = new Map(this.rows.map((row) => [row.key, row]));
    const wanted = Array.from({ length: controls }, (_, index) => ({
      kind: "control",
      name: nets[index] ?? "",
      title: this.named ? nets[index] : `Control picture${controls > 1 ? ` ${index + 1}` : ""}`,
      moded: takes.has("control_mode"),
    }));
    if (takes.has("ip_adapters")) {
      for (const name of card.ip_adapters ?? []) {
        wanted.push({ kind: "ip", name, title: name, moded: false });
      }
    }
    this.rows = wanted.map((one) => {
      const key = `${one.kind} ${one.title}`;
      return before.get(key) ?? this.row({ ...one, key });
    });
    this.list.replaceChildren(...this.rows.map(({ element }) => element));
    this.section.hidden = !this.rows.length;
  }

  row(facts) {
    const element = this.template.content.firstElementChild.cloneNode(true);
    const part = (name) => element.querySelector(`[data-part="${name}"]`);
    const row = { ...facts, element, part, guide: null };
    part("name").textContent = facts.title;
    part("about").textContent = facts.kind === "ip" ? "IP-Adapter" : "Control";
    part("mode-field").hidden = !facts.moded;
    for (const name of ["scale", "mode"]) {
      part(name).id = `${facts.key}-${name}`.replaceAll(" ", "-");
      part(`${name}-label`).htmlFor = part(name).id;
      part(name).addEventListener("input", () => this.clear(row));
    }
    const file = part("file");
    const take = (chosen) => chosen && this.read(row, chosen);
    part("choose").addEventListener("click", () => file.click());
    part("pick").addEventListener("click", () => file.click());
    part("edges").addEventListener("click", () => this.put(row, EDGES));
    part("remove").addEventListener("click", () => {
      this.put(row, null);
      part("pick").focus();
    });
    file.addEventListener("change", () => {
      take(file.files[0]);
      file.value = "";
    });
    receiveIn(element, take);
    this.show(row);
    return row;
  }

  async read(row, file) {
    try {
      this.put(row, prepare(await decode(file), file.name));
    } catch (error) {
      this.tell(row, error.message);
    }
  }

  put(row, guide) {
    row.guide = guide;
    this.clear(row);
    this.show(row);
  }

  show(row) {
    const { guide, part, title } = row;
    const drawn = canvasOf(guide, this.picture);
    const what = { [EDGES]: "edges of the picture" }[guide] ?? guide?.name ?? "no picture";
    part("pick").replaceChildren(...(drawn ? [thumbnail(drawn, SIDE)] : []));
    part("pick").setAttribute("aria-label", `Choose a picture for ${title}: ${what}`);
    part("edges").hidden = row.kind === "ip" || !this.picture;
    part("remove").hidden = !guide;
    part("choose").hidden = Boolean(guide);
    part("edges").setAttribute("aria-pressed", String(guide === EDGES));
  }

  /** The picture that is edited, whose edges may be drawn; null: there is none. */
  usePicture(picture) {
    this.picture = picture?.canvas ?? null;
    for (const row of this.rows) {
      if (row.guide === EDGES && !picture) this.put(row, null);
      else this.show(row);
    }
  }

  /** What the rows have, to be sent or to be brought back. */
  state() {
    return this.rows.map(({ key, kind, name, guide, part }) => {
      return { key, kind, name, guide, scale: part("scale").value, mode: part("mode").value };
    });
  }

  fill(state) {
    const known = new Map(state.map((one) => [one.key, one]));
    for (const row of this.rows) {
      const { guide = null, scale = "", mode = "" } = known.get(row.key) ?? {};
      row.part("scale").value = scale;
      row.part("mode").value = mode;
      this.put(row, guide);
    }
  }

  /** True if all can be sent; else the first row that can't is marked. */
  check() {
    for (const row of this.rows) this.clear(row);
    for (const row of this.rows) {
      const { part, guide, kind } = row;
      if (kind === "control" && !this.named && !guide) {
        return this.tell(row, "The model needs a picture here.");
      }
      for (const name of guide ? ["scale", "mode"] : []) {
        if (!part(name).checkValidity()) return this.tell(row, part(name).validationMessage, name);
      }
    }
    return true;
  }

  /** Puts the server's message at the rows of a field; false if there are none. */
  mark(field, message) {
    const kind = Object.keys(FIELDS).find((one) => FIELDS[one].includes(field));
    const rows = this.rows.filter((row) => row.kind === kind);
    const row = rows.find(({ guide }) => guide) ?? rows[0];
    if (!row) return false;
    const [, end] = field.match(/_(scale|mode)$/) ?? [];
    this.tell(row, message, end);
    return true;
  }

  /** Writes a message under a row; the focus goes to what is wrong. Returns false. */
  tell(row, message, name = "pick") {
    this.clear(row);
    this.section.open = true;
    const [problem, input] = [row.part("problem"), row.part(name)];
    problem.textContent = message;
    problem.hidden = false;
    problem.id = `${row.part("scale").id}-problem`;
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", problem.id);
    input.focus({ preventScroll: true });
    problem.scrollIntoView({ block: "nearest" });
    return false;
  }

  clear({ part }) {
    part("problem").hidden = true;
    for (const name of ["pick", "scale", "mode"]) {
      part(name).removeAttribute("aria-invalid");
      part(name).removeAttribute("aria-describedby");
    }
  }

  /** Adds the fields of a run to a form: the pictures, which adapters they are for, and how. */
  async append(body, state, picture) {
    const controls = state.filter(({ kind, guide }) => kind === "control" && guide);
    const shown = state.filter(({ kind, guide }) => kind === "ip" && guide);
    for (const one of controls) await add(body, "control_image", one, picture);
    for (const one of shown) await add(body, "ip_adapter_image", one, picture);
    if (this.named && state.some(({ kind }) => kind === "control")) {
      body.append("controlnet", named(controls) || "none");
    } else if (controls.some(({ scale }) => scale)) {
      for (const { scale } of controls) body.append("controlnet_conditioning_scale", scale || "1");
    }
    if (controls.some(({ mode }) => mode)) {
      for (const { mode } of controls) body.append("control_mode", mode || "0");
    }
    if (shown.length) body.append("ip_adapter", named(shown));
  }
}

const canvasOf = (guide, picture) => {
  return guide === EDGES ? picture && edgesOf(picture) : guide?.canvas;
};

/** NAME or NAME:SCALE of each, as the server reads them. */
function named(rows) {
  const one = ({ name, scale }) => (scale ? `${name}:${Number(scale).toFixed(4)}` : name);
  return rows.map(one).join(",");
}

async function add(body, field, { guide }, picture) {
  body.append(field, await pngOf(canvasOf(guide, picture?.canvas)), `${field}.png`);
}

/** Calls take(file) with a picture that is dropped on an element, or pasted into it. */
function receiveIn(element, take) {
  const pictureIn = (list) => [...(list ?? [])].find(({ type }) => type.startsWith("image/"));
  const ours = (event) => event.dataTransfer?.types.includes("Files");
  const lit = (on) => element.classList.toggle("target", on);
  element.addEventListener("dragenter", (event) => ours(event) && lit(true));
  element.addEventListener("dragleave", (event) => {
    if (!element.contains(event.relatedTarget)) lit(false);
  });
  element.addEventListener("drop", (event) => {
    if (!ours(event)) return;
    event.preventDefault();
    event.stopPropagation(); // it isn't the picture to edit
    lit(false);
    document.body.classList.remove("dragging");
    take(pictureIn(event.dataTransfer.files) ?? event.dataTransfer.files[0]);
  });
  element.addEventListener("paste", (event) => {
    const file = pictureIn(event.clipboardData?.files);
    if (!file) return;
    event.preventDefault();
    event.stopPropagation();
    take(file);
  });
}
