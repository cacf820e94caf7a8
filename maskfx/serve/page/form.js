// The fields beside the picture: which of them the model takes, what they say, what is wrong.

const PROMPTS = {
  edit: ["What should stand where you painted?", "Say what should stand where you painted."],
  picture: ["What should the picture show?", "Say what the picture should show."],
};
const ASPECTS = [["Landscape", 3 / 2], ["Portrait", 2 / 3], ["Wide", 16 / 9], ["Tall", 9 / 16]];

export class Form {
  constructor(form) {
    this.form = form;
    [, this.unsaid] = PROMPTS.edit; // where the prompt is empty
    form.addEventListener("input", (event) => this.clear(event.target));
  }

  /**
   * Shows the fields that a model takes for what is made, "edit" or "picture", and its own values
   * where a field is left empty.
   */
  suit(card, made) {
    const takes = new Set(card.takes ?? []);
    for (const field of this.form.querySelectorAll("[data-takes], [data-for]")) {
      const { takes: needed, for: only = made } = field.dataset;
      field.hidden = only !== made || (needed !== undefined && !takes.has(needed));
    }
    [this.form.elements.prompt.placeholder, this.unsaid] = PROMPTS[made];
    this.sizes(card);
    const { lora, num_inference_steps: steps, guidance_scale: guidance } = this.form.elements;
    const names = card.loras ?? [];
    if (!names.length) lora.closest(".field").hidden = true;
    lora.replaceChildren(new Option("None", ""), ...names.map((name) => new Option(name)));
    steps.placeholder = card.steps ?? "";
    guidance.placeholder = card.guidance ?? "";
  }

  /** Offers sizes for pictures from text: the model's own, and others with as many pixels. */
  sizes({ size: [width, height] = [512, 512], multiple = 8 }) {
    const { size } = this.form.elements;
    const chosen = size.selectedIndex;
    const sizes = [[`The model’s own: ${width} × ${height}`, width, height]];
    for (const [name, aspect] of ASPECTS) {
      const side = (length) => Math.max(1, Math.round(length / multiple)) * multiple;
      const [wide, tall] = [Math.sqrt(width * height * aspect), Math.sqrt((width * height) / aspect)];
      sizes.push([`${name}: ${side(wide)} × ${side(tall)}`, side(wide), side(tall)]);
    }
    size.replaceChildren(...sizes.map(([text, wide, tall]) => new Option(text, `${wide}x${tall}`)));
    size.selectedIndex = Math.max(0, chosen);
  }

  /** Every field that isn't empty and that the model takes, by the API's name. */
  values() {
    const values = {};
    for (const input of this.form.elements) {
      const value = input.name && !input.closest("[hidden]") ? input.value.trim() : "";
      if (value) values[input.name] = value;
    }
    return values;
  }

  fill(values) {
    for (const input of this.form.elements) {
      if (input.name && input.name !== "model") input.value = values[input.name] ?? "";
    }
    const { size } = this.form.elements;
    size.selectedIndex = Math.max(0, size.selectedIndex);
    this.clearAll();
  }

  /** The first field that can't be sent is marked; true if there is none. */
  check() {
    this.clearAll();
    const { prompt } = this.form.elements;
    if (!prompt.value.trim()) {
      this.mark("prompt", this.unsaid);
      return false;
    }
    for (const input of this.form.elements) {
      if (input.name && !input.closest("[hidden]") && !input.checkValidity()) {
        this.mark(input.name, input.validationMessage);
        return false;
      }
    }
    return true;
  }

  /** Puts a message under a field and the focus into it; false if there is no such field. */
  mark(name, message) {
    const input = this.form.elements[name];
    const field = input?.closest(".field");
    if (!field || field.hidden) return false;
    this.clear(input);
    const details = input.closest("details");
    if (details) details.open = true;
    const problem = document.createElement("p");
    problem.className = "problem";
    problem.id = `${input.id}-problem`;
    problem.textContent = message;
    field.append(problem);
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", problem.id);
    input.focus({ preventScroll: true });
    problem.scrollIntoView({ block: "nearest" });
    return true;
  }

  clear(input) {
    if (!input.removeAttribute) return;
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
    input.closest(".field")?.querySelector(".problem")?.remove();
  }

  clearAll() {
    for (const input of this.form.elements) this.clear(input);
  }
}
