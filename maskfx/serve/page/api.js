// What the page asks of the server, and how its failures are named. Knows nothing of the page.

import { EventParser } from "./events.js";

const KEY = "maskfx.key";

/** A request that failed: what the server said of it, or what became of the connection. */
export class Failure extends Error {
  constructor(message, { status = 0, code = "", param = null, id = "", after = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, id, after });
  }
}

const UNREACHABLE = "The server can’t be reached. Is it running?";
const CUT = "The connection broke before the picture was finished.";

/** The failure that a response stands for, its JSON error if it has one. */
async function failureOf(response) {
  const after = Number.parseFloat(response.headers.get("retry-after"));
  const facts = {
    status: response.status,
    id: response.headers.get("x-request-id") ?? "",
    after: Number.isFinite(after) ? after : null,
  };
  let error;
  try {
    error = (await response.json()).error;
  } catch {
    error = null; // a proxy's page, or nothing
  }
  if (!error?.message) return new Failure(`The server answered ${response.status}.`, facts);
  return new Failure(error.message, { ...facts, code: error.code ?? "", param: error.param });
}

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
  return bytes;
}

function pictureOf(event) {
  const type = `image/${event.output_format ?? "png"}`;
  return new Blob([bytesOf(event.b64_json)], { type });
}

export class Api {
  constructor(root = "") {
    this.root = root; // relative, so that the page works behind a prefix
  }

  get key() {
    return sessionStorage.getItem(KEY) ?? "";
  }

  set key(value) {
    sessionStorage.setItem(KEY, value);
  }

  async ask(path, options = {}) {
    const headers = this.key ? { authorization: `Bearer ${this.key}` } : {};
    let response;
    try {
      response = await fetch(this.root + path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure(UNREACHABLE, { code: "unreachable" });
    }
    if (!response.ok) throw await failureOf(response);
    return response;
  }

  /** The models: their names, and what each takes. */
  async models(signal) {
    const listing = await (await this.ask("v1/models", { signal })).json();
    const models = listing.data.filter(({ parent }) => !parent); // a LoRA is a field of its own
    return models.map(({ id, maskfx }) => ({ id, ...maskfx }));
  }

  /** Has a picture's template recorded when the server is idle. */
  async recordAhead(form) {
    await this.ask("v1/templates", { method: "POST", body: form });
  }

  /**
   * One picture, by the route of edits or of generations. Previews go to onPreview as they come;
   * returns the picture and what it took.
   */
  async make(route, form, { signal, onPreview }) {
    const response = await this.ask(`v1/images/${route}`, { method: "POST", body: form, signal });
    const id = response.headers.get("x-request-id") ?? "";
    for await (const event of this.events(response)) {
      if (event.error) {
        const { message, code, param } = event.error;
        throw new Failure(message, { code, param, id, status: response.status });
      }
      if (event.type.endsWith(".partial_image")) {
        onPreview(pictureOf(event), event.partial_image_index);
      }
      if (event.type.endsWith(".completed")) {
        return { picture: pictureOf(event), facts: event.maskfx ?? {} };
      }
    }
    throw new Failure(CUT, { code: "connection_cut", id });
  }

  async *events(response) {
    const parser = new EventParser();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        for (const { name, data } of parser.feed(value)) {
          if (data !== "[DONE]") yield { type: name, ...JSON.parse(data) };
        }
      }
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure(CUT, { code: "connection_cut" });
    } finally {
      reader.cancel().catch(() => {}); // it may be broken already
    }
  }
}
