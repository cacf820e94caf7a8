// Where the picture stands on the stage: scale and offset, in CSS pixels.

const LARGEST = 32;
const FITTED = 8; // a tiny picture isn't blown up further than this by itself
const RIM = 8; // the keyboard's brush stays so far inside the stage

export class View {
  constructor() {
    this.stage = { width: 1, height: 1 };
    this.picture = { width: 1, height: 1 };
    this.padding = 0;
    this.above = 0; // what stands over the stage's upper edge
    this.fit();
  }

  resize(width, height) {
    this.stage = { width, height };
    this.padding = Math.min(width, height) < 480 ? 10 : 28;
    if (this.fitted) this.fit();
    else this.keepInSight();
  }

  /** Leaves room at the upper edge for what stands there. */
  leave(above) {
    this.above = above;
    if (this.fitted) this.fit();
  }

  show(width, height) {
    this.picture = { width, height };
    this.fit();
  }

  /** The stage's height without the upper rim. */
  get free() {
    return this.stage.height - Math.max(this.padding, this.above);
  }

  get fitScale() {
    const across = (this.stage.width - 2 * this.padding) / this.picture.width;
    const down = (this.free - this.padding) / this.picture.height;
    return Math.max(0.01, Math.min(across, down, FITTED));
  }

  fit() {
    this.fitted = true;
    this.scale = this.fitScale;
    this.x = Math.round((this.stage.width - this.picture.width * this.scale) / 2);
    const spare = this.free - this.padding - this.picture.height * this.scale;
    this.y = Math.round(this.stage.height - this.free + spare / 2);
  }

  /** Zooms by a factor; the point of the stage stays where it is. */
  zoom(factor, x = this.stage.width / 2, y = this.stage.height / 2) {
    const smallest = Math.min(1, this.fitScale) / 2;
    const scale = Math.min(LARGEST, Math.max(smallest, this.scale * factor));
    this.x = x - ((x - this.x) * scale) / this.scale;
    this.y = y - ((y - this.y) * scale) / this.scale;
    this.scale = scale;
    this.keepInSight();
  }

  pan(dx, dy) {
    this.x += dx;
    this.y += dy;
    this.keepInSight();
  }

  keepInSight() {
    this.fitted = false;
    const within = (at, picture, stage) => {
      const rim = Math.min(64, picture, stage / 2);
      return Math.min(stage - rim, Math.max(rim - picture, at));
    };
    this.x = within(this.x, this.picture.width * this.scale, this.stage.width);
    this.y = within(this.y, this.picture.height * this.scale, this.stage.height);
  }

  /** Pans so that a point of the picture is on the stage. */
  reveal(x, y) {
    const at = this.toStage(x, y);
    const over = (value, size) => Math.min(0, value - RIM) + Math.max(0, value + RIM - size);
    const dx = over(at.x, this.stage.width);
    const dy = over(at.y, this.stage.height);
    if (dx || dy) this.pan(-dx, -dy);
  }

  toPicture(x, y) {
    return { x: (x - this.x) / this.scale, y: (y - this.y) / this.scale };
  }

  toStage(x, y) {
    return { x: x * this.scale + this.x, y: y * this.scale + this.y };
  }
}
