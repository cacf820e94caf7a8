// Turns pointers and keys on the canvas into strokes, pans and zooms: mouse, pen, touch, keyboard.

const PEN_ERASER = 32; // of PointerEvent.buttons
const MIDDLE = 1;
export const SIZES = { least: 1, most: 400 };

export class Brush extends EventTarget {
  constructor(stage) {
    super();
    this.stage = stage;
    this.tool = "paint"; // or "erase", "pan"
    this.size = 48; // pixels of the picture across
    this.locked = false; // while a run is under way
    this.pointers = new Map();
    this.doing = null; // "stroke", "key", "pan", "pinch", "split"
    this.last = null; // where the stroke is
    this.spot = null; // where the keyboard left the brush
    this.listen();
  }

  listen() {
    const canvas = this.stage.canvas;
    const on = (kind, handle) => canvas.addEventListener(kind, (event) => handle.call(this, event));
    on("pointerdown", this.down);
    on("pointermove", this.move);
    on("pointerup", this.up);
    on("pointercancel", this.up);
    on("pointerleave", () => this.hover(null));
    on("keydown", this.key);
    on("keyup", this.keyUp);
    on("focus", this.focus);
    on("blur", () => this.doing === "key" && this.finish());
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
  }

  /** Shows the brush to those who came by keyboard. */
  focus() {
    if (this.stage.picture && this.stage.canvas.matches(":focus-visible")) this.moveCursor(0, 0);
  }

  get stroking() {
    return this.doing === "stroke" || this.doing === "key";
  }

  get erasing() {
    return this.tool === "erase";
  }

  at(event) {
    const { left, top } = this.stage.canvas.getBoundingClientRect();
    return { x: event.clientX - left, y: event.clientY - top };
  }

  down(event) {
    if (!this.stage.picture) return;
    this.stage.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.at(event));
    if (this.pointers.size === 2) return this.pinch();
    if (this.pointers.size > 2 || (event.button > MIDDLE && !(event.buttons & PEN_ERASER))) return;
    if (this.stage.comparing) this.doing = "split";
    else if (this.tool === "pan" || event.button === MIDDLE || this.locked) this.doing = "pan";
    else return this.startStroke(event);
    if (this.doing === "split") this.splitAt(this.at(event));
  }

  startStroke(event) {
    this.doing = "stroke";
    this.value = this.erasing || event.buttons & PEN_ERASER ? 0 : 1;
    this.stage.mask.begin();
    this.last = null;
    this.strokeTo(this.at(event));
  }

  /** A second finger: what the first began was no stroke. */
  pinch() {
    if (this.doing === "stroke") {
      this.stage.repaint(this.stage.mask.cancel());
      this.tell("mask");
    }
    this.doing = "pinch";
    this.hover(null);
  }

  move(event) {
    const from = this.pointers.get(event.pointerId);
    const to = this.at(event);
    if (event.pointerType !== "touch") this.hover(to);
    if (!from) return;
    if (this.doing === "stroke") {
      const all = event.getCoalescedEvents?.() ?? [];
      for (const part of all.length ? all : [event]) this.strokeTo(this.at(part));
      if (event.pointerType === "touch") this.hover(to);
    } else if (this.doing === "pinch") this.pinchTo(event.pointerId, to);
    else if (this.doing === "pan") this.pan(to.x - from.x, to.y - from.y);
    else if (this.doing === "split") this.splitAt(to);
    this.pointers.set(event.pointerId, to);
  }

  pinchTo(id, to) {
    const [[, other]] = [...this.pointers].filter(([key]) => key !== id);
    const from = this.pointers.get(id);
    const apart = (a, b) => Math.max(8, Math.hypot(a.x - b.x, a.y - b.y));
    const middle = { x: (to.x + other.x) / 2, y: (to.y + other.y) / 2 };
    this.pan((to.x - from.x) / 2, (to.y - from.y) / 2);
    this.zoom(apart(to, other) / apart(from, other), middle.x, middle.y);
  }

  up(event) {
    if (!this.pointers.delete(event.pointerId)) return;
    if (this.doing === "stroke") {
      if (event.type === "pointercancel") this.stage.repaint(this.stage.mask.cancel());
      this.finish();
    }
    if (this.pointers.size === 0) this.doing = null;
    if (event.pointerType === "touch") this.hover(null);
  }

  finish() {
    this.stage.mask.end();
    this.doing = null;
    this.last = null;
    this.tell("mask");
  }

  strokeTo(spot) {
    this.lineTo(this.stage.view.toPicture(spot.x, spot.y));
  }

  lineTo(point) {
    const from = this.last ?? point;
    const { mask } = this.stage;
    const box = mask.stroke(from.x, from.y, point.x, point.y, this.size / 2, this.value);
    this.last = point;
    this.stage.repaint(box);
    this.tell("mask");
  }

  hover(spot) {
    const seen = spot && this.tool !== "pan" && !this.locked;
    const at = seen ? this.stage.view.toPicture(spot.x, spot.y) : null;
    this.stage.brush = at && { ...at, radius: this.size / 2 };
    this.stage.draw();
  }

  splitAt(spot) {
    const { x } = this.stage.view.toPicture(spot.x, 0);
    this.stage.split = Math.min(1, Math.max(0, x / this.stage.picture.canvas.width));
    this.tell("split");
  }

  wheel(event) {
    if (!this.stage.picture) return;
    event.preventDefault();
    const { x, y } = this.at(event);
    const notch = event.deltaMode ? 16 * event.deltaY : event.deltaY;
    if (event.shiftKey) this.pan(-notch, 0);
    else this.zoom(Math.exp(-Math.max(-200, Math.min(200, notch)) / 300), x, y);
  }

  pan(dx, dy) {
    this.stage.view.pan(dx, dy);
    this.tell("view");
  }

  zoom(factor, x, y) {
    this.stage.view.zoom(factor, x, y);
    this.tell("view");
  }

  fit() {
    this.stage.view.fit();
    this.tell("view");
  }

  resize(size) {
    this.size = Math.round(Math.min(SIZES.most, Math.max(SIZES.least, size)));
    if (this.stage.brush) this.stage.brush.radius = this.size / 2;
    this.tell("size");
  }

  /** The next size up (1) or down (-1). */
  step(direction) {
    const change = Math.max(1, this.size * 0.15);
    this.resize(direction > 0 ? Math.ceil(this.size + change) : Math.floor(this.size - change));
  }

  /** The brush as the keyboard moves it; in the middle until it has moved. */
  cursor() {
    const { width, height } = this.stage.picture.canvas;
    const { x, y } = this.stage.brush ?? this.spot ?? { x: width / 2, y: height / 2 };
    return { x: Math.min(x, width), y: Math.min(y, height) };
  }

  key(event) {
    const arrow = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!this.stage.picture || event.ctrlKey || event.metaKey || event.altKey) return;
    if (arrow[event.key]) this.moveCursor(...arrow[event.key], event.shiftKey);
    else if (event.key === " ") this.press(event);
    else return;
    event.preventDefault();
  }

  moveCursor(dx, dy, fine) {
    const { width, height } = this.stage.picture.canvas;
    const step = fine ? 1 : Math.max(1, Math.round(this.size / 4));
    const { x, y } = this.cursor();
    const clamp = (value, most) => Math.min(most, Math.max(0, value));
    const to = { x: clamp(x + dx * step, width), y: clamp(y + dy * step, height) };
    this.stage.brush = { ...to, radius: this.size / 2 };
    this.spot = to;
    this.stage.view.reveal(to.x, to.y);
    if (this.doing === "key") this.lineTo(to);
    this.tell("cursor");
  }

  /** Space is down: strokes follow the arrow keys until it is up. */
  press(event) {
    if (event.repeat || this.locked || this.doing || this.stage.comparing) return;
    this.doing = "key";
    this.value = this.erasing ? 0 : 1;
    this.stage.mask.begin();
    const at = this.cursor();
    this.stage.brush = { ...at, radius: this.size / 2 };
    this.last = null;
    this.lineTo(at);
  }

  keyUp(event) {
    if (event.key === " " && this.doing === "key") this.finish();
  }

  tell(kind) {
    this.stage.draw();
    this.dispatchEvent(new Event(kind));
  }
}
