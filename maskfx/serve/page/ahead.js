// Asks the server to record a picture's template while it has nothing else to do, so that the first
// edit may find it. Nothing depends on the answer, so failures are not shown.

/** The fields that a template depends on: those of POST /v1/templates, by the API's name. */
const FIELDS = ["model", "num_inference_steps", "guidance_scale", "strength", "negative_prompt", "lora"];

export class Ahead {
  constructor(api) {
    this.api = api;
    this.asked = new WeakMap(); // by picture, the fields that were sent for it
  }

  /** Sends a picture with the fields of its edits, once; only to models that take it alone. */
  async record(picture, card, values, encode) {
    const takes = new Set(card?.takes ?? []);
    if (!takes.has("ahead") || takes.has("control")) return;
    const body = new FormData();
    body.append("record_at", "idle");
    for (const [name, value] of Object.entries({ model: card.id, ...values })) {
      if (FIELDS.includes(name)) body.append(name, value);
    }
    const fields = JSON.stringify([...body.entries()]);
    if (this.asked.get(picture) === fields) return;
    this.asked.set(picture, fields);
    try {
      body.append("image", await encode(picture.canvas), "image.png");
      if (this.asked.get(picture) === fields) await this.api.recordAhead(body);
    } catch {
      this.asked.delete(picture); // another change of the fields tries again
    }
  }
}
