// Draws: the picture, the mask over it or the result beside it, the sites, the brush. Owns the
// canvas and nothing that is sent; all that it shows is given to it.

import { View } from "./view.js";
import { pool } from "./mask.js";

const RUBYLITH = [232, 64, 28]; // the film that masks were once cut from
const INK = "rgba(20, 18, 16, 0.85)";
const PAPER = "rgba(255, 255, 255, 0.95)";

function layer(width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  return canvas;
}

export class Stage {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.view = new View();
    this.picture = this.mask = this.preview = this.result = null;
    this.grid = { columns: 1, rows: 1 }; // of sites
    this.sites = null;
    this.showSites = false;
    this.comparing = false;
    this.split = 0.5; // so much of the picture's width, from the left, is before
    this.brush = null; // {x, y, radius} in the picture's pixels
    this.waiting = false;
    this.painted = () => {}; // told after each frame, for what stands over the canvas
    new ResizeObserver(() => this.resize()).observe(canvas);
    this.resize();
  }

  resize() {
    const { width, height } = this.canvas.getBoundingClientRect();
    this.ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.max(1, Math.round(width * this.ratio));
    this.canvas.height = Math.max(1, Math.round(height * this.ratio));
    this.view.resize(width, height);
    this.draw();
  }

  show(picture, mask, grid) {
    const { width, height } = picture.canvas;
    const same = this.picture?.canvas.width === width && this.picture.canvas.height === height;
    Object.assign(this, { picture, mask, grid, preview: null, result: null, comparing: false });
    this.tint = layer(width, height);
    this.overlay = layer(width, height);
    if (!same) this.view.show(width, height);
    this.repaint({ left: 0, top: 0, right: width, bottom: height });
  }

  clear() {
    Object.assign(this, { picture: null, mask: null, preview: null, result: null, sites: null });
    this.comparing = false;
    this.draw();
  }

  /** The mask changed within a box. */
  repaint(box) {
    if (!box) return;
    const { left, top } = box;
    const [width, height] = [box.right - left, box.bottom - top];
    const image = new ImageData(width, height);
    const words = new Uint32Array(image.data.buffer);
    const [red, green, blue] = RUBYLITH;
    const colour = ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
    for (let y = 0; y < height; y += 1) {
      const row = (top + y) * this.mask.width + left;
      for (let x = 0; x < width; x += 1) if (this.mask.bits[row + x]) words[y * width + x] = colour;
    }
    this.tint.getContext("2d").putImageData(image, left, top);
    this.sites = null;
    this.draw();
  }

  /** The mask's sites; counted when they are asked for. */
  pooled() {
    this.sites ??= pool(this.mask, this.grid);
    return this.sites;
  }

  setGrid(grid) {
    Object.assign(this, { grid, sites: null });
    this.draw();
  }

  /** A rough picture of the run under way, seen where the mask is, or everywhere. */
  showPreview(bitmap, everywhere) {
    const { width, height } = this.picture.canvas;
    this.preview = layer(width, height);
    const pen = this.preview.getContext("2d");
    pen.drawImage(bitmap, 0, 0, width, height);
    if (!everywhere) {
      pen.globalCompositeOperation = "destination-in";
      pen.drawImage(this.tint, 0, 0);
    }
    this.draw();
  }

  /** Once, before the next frame. */
  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.paint();
      this.painted();
    });
  }

  paint() {
    const pen = this.context;
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (!this.picture) return;
    const { width, height } = this.picture.canvas;
    // whole device pixels, or a picture at 100 % would be smeared
    const at = { x: Math.round(this.view.x * this.ratio), y: Math.round(this.view.y * this.ratio) };
    const scale = this.view.scale * this.ratio;
    const { x: left, y: top, scale: zoom } = this.view;
    Object.assign(this.canvas.dataset, { left, top, scale: zoom }); // for whoever scripts the page
    pen.setTransform(scale, 0, 0, scale, at.x, at.y);
    pen.imageSmoothingEnabled = scale < 3;
    pen.imageSmoothingQuality = "high";
    pen.drawImage(this.picture.canvas, 0, 0);
    if (this.comparing && this.result) this.paintResult(pen, width, height);
    else this.paintMask(pen);
    if (this.showSites) this.paintSites(pen, scale);
    if (!this.comparing) this.paintBrush(pen, scale);
  }

  paintResult(pen, width, height) {
    const edge = this.split * width;
    pen.save();
    pen.beginPath();
    pen.rect(edge, 0, width - edge, height);
    pen.clip();
    pen.drawImage(this.result, 0, 0, width, height);
    pen.restore();
  }

  paintMask(pen) {
    if (this.preview) pen.drawImage(this.preview, 0, 0);
    else {
      pen.globalAlpha = 0.5;
      pen.drawImage(this.tint, 0, 0);
      pen.globalAlpha = 1;
    }
  }

  paintSites(pen, scale) {
    const { columns, rows, cells } = this.pooled();
    const line = Math.max(1, Math.round(this.ratio)) / scale;
    const [wide, tall] = [this.mask.width / columns, this.mask.height / rows];
    const frame = new Path2D();
    for (let row = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        if (cells[row * columns + column]) frame.rect(column * wide, row * tall, wide, tall);
      }
    }
    pen.fillStyle = "rgba(20, 18, 16, 0.2)";
    pen.fill(frame);
    pen.lineWidth = line;
    pen.strokeStyle = wide * scale < 5 ? "transparent" : "rgba(255, 255, 255, 0.75)";
    pen.stroke(frame);
  }

  paintBrush(pen, scale) {
    if (!this.brush) return;
    const { x, y, radius } = this.brush;
    pen.beginPath();
    pen.arc(x, y, Math.max(radius, 2 / scale), 0, 2 * Math.PI);
    for (const [width, colour] of [[3, INK], [1.5, PAPER]]) {
      pen.lineWidth = (width * this.ratio) / scale;
      pen.strokeStyle = colour;
      pen.stroke();
    }
  }
}
