// The mask: one byte a pixel, 1 where the picture is edited. Strokes are rasterised here, without
// anti-aliasing, so that what is sent is what was painted. Knows nothing of canvases or pointers.

const UNDO_BYTES = 64 << 20; // of all kept patches together
const THINNEST = Math.SQRT1_2; // so that any spot touches at least the pixel that it is in

/** A rectangle of whole pixels; right and bottom are outside it. */
function union(a, b) {
  if (!a) return b;
  return {
    left: Math.min(a.left, b.left),
    top: Math.min(a.top, b.top),
    right: Math.max(a.right, b.right),
    bottom: Math.max(a.bottom, b.bottom),
  };
}

export class Mask {
  constructor(width, height) {
    this.width = width;
    this.height = height;
    this.bits = new Uint8Array(width * height);
    this.count = 0; // painted pixels
    this.before = null; // all bits as they were when the running stroke began
    this.box = null; // what the running stroke reached
    this.past = [];
    this.future = [];
  }

  get canUndo() {
    return this.past.length > 0;
  }

  get canRedo() {
    return this.future.length > 0;
  }

  begin() {
    this.before = this.bits.slice();
    this.box = null;
  }

  /** Sets every pixel whose centre is within the radius of the line. Returns the changed box. */
  stroke(x0, y0, x1, y1, radius, value) {
    const reach = Math.max(radius, THINNEST);
    const box = {
      left: Math.max(0, Math.floor(Math.min(x0, x1) - reach)),
      top: Math.max(0, Math.floor(Math.min(y0, y1) - reach)),
      right: Math.min(this.width, Math.ceil(Math.max(x0, x1) + reach)),
      bottom: Math.min(this.height, Math.ceil(Math.max(y0, y1) + reach)),
    };
    if (box.left >= box.right || box.top >= box.bottom) return null;
    const [dx, dy] = [x1 - x0, y1 - y0];
    const length2 = dx * dx + dy * dy;
    for (let y = box.top; y < box.bottom; y += 1) {
      for (let x = box.left; x < box.right; x += 1) {
        const [px, py] = [x + 0.5 - x0, y + 0.5 - y0];
        const along = length2 ? Math.min(1, Math.max(0, (px * dx + py * dy) / length2)) : 0;
        const [ox, oy] = [px - along * dx, py - along * dy];
        if (ox * ox + oy * oy <= reach * reach) this.set(y * this.width + x, value);
      }
    }
    this.box = union(this.box, box);
    return box;
  }

  set(index, value) {
    this.count += value - this.bits[index];
    this.bits[index] = value;
  }

  /** Ends the stroke; true if it changed anything. */
  end() {
    const box = this.box;
    const before = this.before;
    this.before = this.box = null;
    if (!before || !box) return false;
    const patch = { box, bits: this.cut(before, box) };
    const now = this.cut(this.bits, box);
    if (now.every((bit, i) => bit === patch.bits[i])) return false;
    this.past.push(patch);
    this.future = [];
    this.forget();
    return true;
  }

  /** Takes the running stroke back. */
  cancel() {
    if (!this.before) return null;
    const box = this.box;
    this.bits = this.before;
    this.before = this.box = null;
    this.count = this.bits.reduce((sum, bit) => sum + bit, 0);
    return box;
  }

  clear() {
    return this.whole(() => 0);
  }

  invert() {
    return this.whole((bit) => 1 - bit);
  }

  whole(change) {
    this.begin();
    for (let i = 0; i < this.bits.length; i += 1) this.set(i, change(this.bits[i]));
    this.box = { left: 0, top: 0, right: this.width, bottom: this.height };
    const box = this.box;
    return this.end() ? box : null;
  }

  undo() {
    return this.swap(this.past, this.future);
  }

  redo() {
    return this.swap(this.future, this.past);
  }

  swap(from, to) {
    const patch = from.pop();
    if (!patch) return null;
    to.push({ box: patch.box, bits: this.cut(this.bits, patch.box) });
    const { left, top, right, bottom } = patch.box;
    let i = 0;
    for (let y = top; y < bottom; y += 1) {
      for (let x = left; x < right; x += 1) this.set(y * this.width + x, patch.bits[i++]);
    }
    return patch.box;
  }

  cut(bits, { left, top, right, bottom }) {
    const out = new Uint8Array((right - left) * (bottom - top));
    for (let y = top; y < bottom; y += 1) {
      const row = y * this.width;
      out.set(bits.subarray(row + left, row + right), (y - top) * (right - left));
    }
    return out;
  }

  forget() {
    let bytes = this.past.reduce((sum, patch) => sum + patch.bits.length, 0);
    while (this.past.length > 1 && bytes > UNDO_BYTES) bytes -= this.past.shift().bits.length;
  }

  /** A mask with the same bits, and no past. */
  copy() {
    const other = new Mask(this.width, this.height);
    other.bits = this.bits.slice();
    other.count = this.count;
    return other;
  }
}

/** The mask max-pooled to a grid: a site is active if anything of it is painted. */
export function pool({ bits, width, height }, { columns, rows }) {
  const cells = new Uint8Array(columns * rows);
  const across = reaches(width, columns);
  const down = reaches(height, rows);
  for (let y = 0; y < height; y += 1) {
    const [upper, lower] = [down.first[y] * columns, down.last[y] * columns];
    for (let x = 0; x < width; x += 1) {
      if (!bits[y * width + x]) continue;
      const left = across.first[x];
      const right = across.last[x];
      for (let row = upper; row <= lower; row += columns) {
        for (let column = left; column <= right; column += 1) cells[row + column] = 1;
      }
    }
  }
  const active = cells.reduce((sum, cell) => sum + cell, 0);
  return { columns, rows, cells, active, share: active / cells.length };
}

/** The first and the last of the cells that each pixel of a side lies in. */
function reaches(side, cells) {
  return {
    first: Int32Array.from({ length: side }, (_, i) => Math.floor((i * cells) / side)),
    last: Int32Array.from({ length: side }, (_, i) => Math.ceil(((i + 1) * cells) / side) - 1),
  };
}
