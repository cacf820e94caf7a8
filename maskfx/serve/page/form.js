// The fields beside the picture: which of them the model takes, what they say, what is wrong.

export class Form {
  constructor(form) {
    this.form = form;
    form.addEventListener("input", (event) => this.clear(event.target));
  }

  /** Shows the fields that a model takes, and its own values where a field is left empty. */
  suit(card) {
    const takes = new Set(card.takes ?? []);
    for (const field of this.form.querySelectorAll("[data-takes]")) {
      field.hidden = !takes.has(field.dataset.takes);
    }
    const { lora, num_inference_steps: steps, guidance_scale: guidance } = this.form.elements;
    const names = card.loras ?? [];
    if (!names.length) lora.closest(".field").hidden = true;
    lora.replaceChildren(new Option("None", ""), ...names.map((name) => new Option(name)));
    steps.placeholder = card.steps ?? "";
    guidance.placeholder = card.guidance ?? "";
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
    this.clearAll();
  }

  /** The first field that can't be sent is marked; true if there is none. */
  check() {
    this.clearAll();
    const { prompt } = this.form.elements;
    if (!prompt.value.trim()) {
      this.mark("prompt", "Say what should stand where you painted.");
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
