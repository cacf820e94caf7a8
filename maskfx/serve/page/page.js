// The page: brings picture, mask, fields and server together. The parts know nothing of each other.

import { Ahead } from "./ahead.js";
import { Api } from "./api.js";
import { Brush, SIZES } from "./brush.js";
import { EXAMPLES, draw } from "./examples.js";
import { Form } from "./form.js";
import { Guides } from "./guides.js";
import { History } from "./history.js";
import { receive } from "./inbox.js";
import { KeyDialog } from "./keydialog.js";
import { Mask } from "./mask.js";
import { MOST_PIXELS, blank, decode, pngOf, prepare } from "./picture.js";
import { maskPng } from "./png.js";
import { Report } from "./report.js";
import { listen } from "./shortcuts.js";
import { Stage } from "./stage.js";

const PREVIEWS = 3;
const COUNTED = 1 << 20; // pixels whose sites can be counted for every frame of a stroke
const GRID = { multiple: 8, site: 8 }; // until a model says otherwise
const AGAIN = [1, 2, 5, 10, 30]; // seconds between looks for a server that isn't there
const SOON = 1; // the longest of these pauses, by its place, while the model loads

const $ = (id) => document.getElementById(id);
const api = new Api();
const ahead = new Ahead(api);
const stage = new Stage($("canvas"));
const brush = new Brush(stage);
const form = new Form($("form"));
const guides = new Guides($("guides"), $("guide-list"), $("guide"));
const history = new History($("history"), $("entries"));
const report = new Report();
const door = new KeyDialog($("key-dialog"), api);

let models = [];
let card = null;
let running = null; // the AbortController of the run under way
let left = null; // the picture and mask from which one came to the start
let limit = Infinity; // pixels of the picture that are wanted; the server has a limit of its own
let link = null; // to the result that can be downloaded

// --- models ---

async function findModels(attempt = 0) {
  try {
    models = await api.models();
  } catch (failure) {
    const locked = failure.status === 401;
    report.server(locked ? "This server wants a key" : "The server can’t be reached");
    if (locked) return door.ask(() => findModels());
    return findModelsLater(attempt);
  }
  const [first] = models;
  if (first.state !== "ready") {
    const failed = first.state === "failed";
    report.server(failed ? `${first.id} can’t run: see the server’s log` : `${first.id} is being loaded`);
    return findModelsLater(Math.min(attempt, SOON));
  }
  $("model").replaceChildren(...models.map(({ id }) => new Option(id)));
  $("model").hidden = models.length < 2;
  report.server(models.length === 1 ? first.id : "");
  return useModel(first);
}

function findModelsLater(attempt) {
  setTimeout(() => findModels(attempt + 1), 1000 * AGAIN[Math.min(attempt, AGAIN.length - 1)]);
}

function useModel(next) {
  card = next;
  guides.suit(card);
  suit();
  showExamples();
  if (hasPicture()) {
    const { source, name, canvas } = stage.picture;
    const fitted = prepare(source, name, needs());
    if (fitted.width !== canvas.width || fitted.height !== canvas.height) usePicture(fitted);
    else stage.setGrid(gridOf(fitted));
    recordAhead();
  }
}

/** False at the start, and while a picture is made from text. */
const hasPicture = () => document.body.dataset.picture === "there";

/** The fields are those of an edit, or of a picture that is made from text. */
function suit() {
  if (!card) return;
  form.suit(card, hasPicture() || !card.generates ? "edit" : "picture");
  $("describe").hidden = !card.generates;
}

function needs() {
  const { multiple } = card ?? GRID;
  return { multiple, pixels: Math.min(limit, card?.pixels ?? MOST_PIXELS) };
}

/** The sites of a picture: the model works at multiples, and the server fits what isn't one. */
function gridOf({ width, height }) {
  const { multiple, site } = card ?? GRID;
  const sites = (side) => Math.max(multiple, Math.floor(side / multiple) * multiple) / site;
  return { columns: sites(width), rows: sites(height) };
}

// --- pictures ---

function showExamples() {
  const [width, height] = card?.size ?? [512, 512];
  const items = EXAMPLES.map((example) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(draw(example, 160, 160), example.name);
    button.addEventListener("click", () => {
      usePicture(prepare(draw(example, width, height), example.name, needs()));
      if (!$("prompt").value) $("prompt").value = example.prompt;
    });
    const item = document.createElement("li");
    item.append(button);
    return item;
  });
  $("examples").replaceChildren(...items);
}

async function open(blob, name) {
  if (!blob) return;
  limit = Infinity;
  try {
    usePicture(prepare(await decode(blob), name, needs()));
  } catch (error) {
    report.trouble(error);
  }
}

/** Begins anew with a picture, or goes back to one with its mask. */
function usePicture(picture, mask = new Mask(picture.width, picture.height)) {
  stop();
  report.clear();
  const first = !stage.picture;
  stage.show(picture, mask, gridOf(picture));
  document.body.dataset.picture = "there";
  suit();
  guides.usePicture(picture);
  history.mark(null);
  showViews(false);
  report.result(null);
  report.note(picture.note, roomForModel(picture));
  setView("mask");
  maskChanged();
  recordAhead();
  if (first) $("canvas").focus({ preventScroll: true }); // what was focused is gone
}

/** Has the picture recorded while it is painted on; again if a field changes. */
function recordAhead() {
  if (hasPicture() && !running) ahead.record(stage.picture, card, form.values(), pngOf);
}

/** Goes to the start, where a picture is chosen or made from text. */
function leavePicture() {
  stop();
  report.clear();
  left = stage.picture && { picture: stage.picture, mask: stage.mask };
  showStart();
  history.mark(null);
  $("choose").focus({ preventScroll: true });
}

function showStart() {
  stage.clear();
  showViews(false);
  report.result(null);
  document.body.dataset.picture = "none";
  document.body.dataset.view = "mask";
  $("handle").hidden = true;
  $("back").hidden = !left;
  guides.usePicture(null);
  suit();
}

/** True if the picture is so much larger than what the model was made for that it may matter. */
function roomForModel({ width, height }) {
  return Boolean(card?.size) && width * height > 1.5 * card.size[0] * card.size[1];
}

function scaleToModel() {
  limit = card.size[0] * card.size[1];
  usePicture(prepare(stage.picture.source, stage.picture.name, needs()));
}

// --- the mask and the view ---

let counting = false;
function maskChanged() {
  $("undo").disabled = !stage.mask?.canUndo;
  $("redo").disabled = !stage.mask?.canRedo;
  $("clear").disabled = !stage.mask?.count;
  if (counting || !stage.picture) return;
  if (brush.stroking && stage.mask.bits.length > COUNTED) return; // once it ends
  counting = true;
  requestAnimationFrame(() => {
    counting = false;
    report.sites(stage.picture, stage.mask, stage.pooled());
  });
}

function changeMask(change) {
  if (running || !stage.mask || brush.stroking) return;
  setView("mask");
  stage.repaint(stage.mask[change]());
  maskChanged();
}

function setTool(tool) {
  brush.tool = tool;
  brush.hover(null);
  document.body.dataset.tool = tool;
  for (const button of $("tools").querySelectorAll("[data-tool]")) {
    button.setAttribute("aria-pressed", String(button.dataset.tool === tool));
  }
  if (stage.comparing && tool !== "pan") setView("mask");
}

/** The switch between mask and result, which the picture makes room for. */
function showViews(shown) {
  $("views").hidden = !shown;
  stage.view.leave(shown ? $("views").offsetTop + $("views").offsetHeight + 8 : 0);
}

function setView(view) {
  stage.comparing = view === "compare" && Boolean(stage.result);
  document.body.dataset.view = stage.comparing ? "compare" : "mask";
  $("view-mask").setAttribute("aria-pressed", String(!stage.comparing));
  $("view-compare").setAttribute("aria-pressed", String(stage.comparing));
  $("handle").hidden = !stage.comparing;
  $("canvas").tabIndex = stage.comparing ? -1 : 0;
  stage.draw();
}

function showSites() {
  stage.showSites = !stage.showSites;
  $("sites").setAttribute("aria-pressed", String(stage.showSites));
  stage.draw();
}

/** What stands over the canvas follows it. */
function place() {
  if (!stage.picture) return;
  const { view, split } = stage;
  const { width, height } = stage.picture.canvas;
  const style = $("stage").style;
  const top = Math.max(0, view.y);
  const bottom = Math.min(view.stage.height, view.y + height * view.scale);
  style.setProperty("--left", `${Math.max(0, view.x)}px`);
  const right = view.stage.width - view.x - width * view.scale;
  style.setProperty("--right", `${Math.max(0, right)}px`);
  style.setProperty("--top", `${top}px`);
  style.setProperty("--tall", `${bottom - top}px`);
  style.setProperty("--split", `${view.x + split * width * view.scale}px`);
  $("split").value = String(Math.round(100 * split));
  $("zoom").textContent = `${Math.round(100 * view.scale)} %`;
}

// --- a run ---

async function generate() {
  if (running) return;
  report.clear();
  if (!stage.picture && !card?.generates) {
    return report.trouble(new Error("Choose a picture first."));
  }
  if (!form.check() || !guides.check()) return;
  if (stage.mask?.count === 0) {
    return report.trouble(new Error("Paint over what should change first."));
  }
  running = new AbortController();
  const run = { picture: stage.picture, mask: stage.mask?.copy() ?? null, values: form.values() };
  run.guides = guides.state();
  const { signal } = running;
  begin(run);
  try {
    const route = run.picture ? "edits" : "generations";
    const { picture, facts } = await api.make(route, await bodyOf(run), {
      signal,
      onPreview: (blob, index) => preview(blob, index, run, signal),
    });
    const result = await decode(picture);
    if (!signal.aborted) finish({ ...run, facts, blob: picture }, result);
  } catch (failure) {
    if (signal.aborted) return;
    end();
    fail(failure);
  }
}

async function bodyOf({ picture, mask, guides: rows, values: { model = card?.id, ...values } }) {
  const body = new FormData();
  if (picture) {
    body.append("image", await pngOf(picture.canvas), "image.png");
    body.append("mask", await maskPng(mask.bits, mask.width, mask.height), "mask.png");
  }
  if (model) body.append("model", model);
  for (const [name, value] of Object.entries(values)) body.append(name, value);
  await guides.append(body, rows, picture);
  const fixed = { n: 1, output_format: "png", stream: true, partial_images: PREVIEWS };
  for (const [name, value] of Object.entries(fixed)) body.append(name, String(value));
  return body;
}

function begin({ picture, values }) {
  if (!picture) {
    const made = blank(...values.size.split("x").map(Number));
    stage.show(made, new Mask(made.width, made.height), gridOf(made));
  }
  setView("mask");
  brush.locked = true;
  document.body.dataset.state = "running";
  report.progress(0, PREVIEWS, picture ? "Computing what you painted…" : "Making the picture…");
  if (!card) report.say("Waiting until the model is loaded…");
  $("go").hidden = true;
  $("cancel").hidden = false;
  $("cancel").focus({ preventScroll: true });
}

async function preview(blob, index, run, signal) {
  const bitmap = await decode(blob);
  if (signal.aborted || running?.signal !== signal) return;
  stage.showPreview(bitmap, !run.picture);
  report.progress(index + 1, PREVIEWS);
}

function end() {
  running = null;
  brush.locked = false;
  document.body.dataset.state = "ready";
  report.progress(null);
  const focused = document.activeElement === $("cancel");
  $("cancel").hidden = true;
  $("go").hidden = false;
  if (focused) $("go").focus({ preventScroll: true });
  stage.preview = null;
  stage.draw();
  if (!hasPicture()) showStart();
}

function finish(entry, result) {
  end();
  if (!entry.picture) useMade(result);
  history.add(entry, result);
  showResult(entry, result);
  report.done(entry);
}

/** Begins with a picture that was made from text. */
function useMade(result) {
  usePicture(prepare(result, "Made from text", needs()));
}

/** Shows an edit beside its picture; a picture that was made from text is there by itself. */
function showResult(entry, result) {
  if (entry.picture) {
    stage.result = result;
    stage.split = 0.5;
    showViews(true);
  }
  if (link) URL.revokeObjectURL(link);
  link = URL.createObjectURL(entry.blob);
  $("download").href = link;
  $("download").download = `maskfx-${entry.facts.seed ?? "result"}.png`;
  report.result(entry);
  if (entry.picture) setView("compare");
}

function stop() {
  if (!running) return;
  running.abort();
  end();
  report.say("Cancelled.");
}

function fail(failure) {
  if (failure.status === 401) return door.ask(generate);
  const { param, message } = failure;
  const placed = Boolean(param) && (form.mark(param, message) || guides.mark(param, message));
  return report.trouble(failure, placed);
}

// --- what the hand does ---

history.addEventListener("choose", async ({ detail: entry }) => {
  const result = await decode(entry.blob);
  if (history.current !== entry) return; // another one was chosen meanwhile
  if (entry.picture) usePicture(entry.picture, entry.mask.copy());
  else useMade(result);
  history.mark(entry);
  form.fill(entry.values);
  guides.fill(entry.guides);
  showResult(entry, result);
});

$("edit-result").addEventListener("click", () => {
  limit = Infinity;
  usePicture(prepare(stage.result, "Result", needs()));
  report.say("The result is the picture now. Paint what should change next.");
});

brush.addEventListener("mask", () => maskChanged());
brush.addEventListener("size", showSize);
brush.addEventListener("cursor", () => report.cursor(brush.cursor(), stage.mask));

function showSize() {
  const { least, most } = SIZES;
  $("size").value = String((100 * Math.log(brush.size / least)) / Math.log(most / least));
  $("size-value").textContent = `${brush.size} px`;
  $("size").setAttribute("aria-valuetext", `${brush.size} pixels`);
}

$("size").addEventListener("input", () => {
  const { least, most } = SIZES;
  brush.resize(least * (most / least) ** (Number($("size").value) / 100));
});

$("split").addEventListener("input", () => {
  stage.split = Number($("split").value) / 100;
  stage.draw();
});

const presses = {
  undo: () => changeMask("undo"),
  redo: () => changeMask("redo"),
  clear: () => changeMask("clear"),
  invert: () => changeMask("invert"),
  sites: showSites,
  "zoom-in": () => brush.zoom(1.25),
  "zoom-out": () => brush.zoom(0.8),
  fit: () => brush.fit(),
  "view-mask": () => setView("mask"),
  "view-compare": () => setView("compare"),
  "scale-to-model": scaleToModel,
  again: generate,
  cancel: stop,
  choose: () => $("file").click(),
  "new-picture": leavePicture,
  back: () => usePicture(left.picture, left.mask),
  describe: () => $("prompt").focus(),
  "open-key": () => door.ask(() => findModels()),
};
for (const [id, press] of Object.entries(presses)) $(id).addEventListener("click", press);
for (const button of $("tools").querySelectorAll("[data-tool]")) {
  button.addEventListener("click", () => setTool(button.dataset.tool));
}
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
$("form").addEventListener("change", recordAhead);
$("model").addEventListener("change", () => {
  useModel(models.find(({ id }) => id === $("model").value));
});
$("numbers").addEventListener("click", ({ target }) => {
  if (target.dataset.seed) $("seed").value = target.dataset.seed;
  if (target.dataset.seed) $("settings").open = true;
});

listen({
  b: () => setTool("paint"),
  e: () => setTool("erase"),
  h: () => setTool("pan"),
  i: presses.invert,
  s: showSites,
  "[": () => brush.step(-1),
  "]": () => brush.step(1),
  "+": presses["zoom-in"],
  "=": presses["zoom-in"],
  "-": presses["zoom-out"],
  0: presses.fit,
  "command z": presses.undo,
  "command shift z": presses.redo,
  "command y": presses.redo,
  "command enter": generate,
  escape: stop,
});
receive($("file"), open);

stage.painted = place;
setTool("paint");
showSize();
showExamples();
maskChanged();
findModels();
