// Edges of a picture as ControlNets for edges take them: white lines on black, found as by Canny.

const [WEAK, STRONG] = [100, 200]; // sums of a Sobel filter, of 8-bit greys

/** Greys of a canvas, blurred a little: noise has edges too. */
function greys(canvas) {
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  const grey = new Float32Array(width * height);
  for (let i = 0; i < grey.length; i += 1) {
    grey[i] = 0.299 * data[4 * i] + 0.587 * data[4 * i + 1] + 0.114 * data[4 * i + 2];
  }
  return blurred(blurred(grey, width, height, 1), width, height, width);
}

/** Each value averaged with its two neighbours along one axis; `step` is 1 or the width. */
function blurred(values, width, height, step) {
  const found = new Float32Array(values.length);
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      const at = y * width + x;
      const [place, most] = step === 1 ? [x, width - 1] : [y, height - 1];
      const before = values[place ? at - step : at];
      const after = values[place < most ? at + step : at];
      found[at] = (before + 2 * values[at] + after) / 4;
    }
  }
  return found;
}

/** How steep the greys are, where they are steepest across an edge; 0 elsewhere. */
function ridges(grey, width, height) {
  const steep = new Float32Array(grey.length);
  const across = new Int32Array(grey.length); // from a pixel to the next one across its edge
  for (let y = 1; y < height - 1; y += 1) {
    for (let x = 1; x < width - 1; x += 1) {
      const at = y * width + x;
      const [up, down] = [at - width, at + width];
      const right = grey[up + 1] + 2 * grey[at + 1] + grey[down + 1];
      const left = grey[up - 1] + 2 * grey[at - 1] + grey[down - 1];
      const below = grey[down - 1] + 2 * grey[down] + grey[down + 1];
      const above = grey[up - 1] + 2 * grey[up] + grey[up + 1];
      const [dx, dy] = [right - left, below - above];
      steep[at] = Math.abs(dx) + Math.abs(dy);
      const [flat, tall] = [Math.abs(dx), Math.abs(dy)];
      if (tall < 0.414 * flat) across[at] = 1;
      else if (flat < 0.414 * tall) across[at] = width;
      else across[at] = dx * dy > 0 ? width + 1 : width - 1;
    }
  }
  return steep.map((value, at) => {
    const step = across[at];
    return step && value > steep[at - step] && value >= steep[at + step] ? value : 0;
  });
}

/** A canvas with the edges of another: strong ones, and weak ones that continue them. */
export function edgesOf(picture) {
  const { width, height } = picture;
  const ridge = ridges(greys(picture), width, height);
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d", { alpha: false });
  const drawn = context.createImageData(width, height);
  const pixels = new Uint32Array(drawn.data.buffer).fill(0xff000000);
  const open = [];
  ridge.forEach((value, at) => value > STRONG && open.push(at));
  while (open.length) {
    const at = open.pop();
    if (pixels[at] === 0xffffffff) continue;
    pixels[at] = 0xffffffff;
    for (const row of [-width, 0, width]) {
      for (const column of [-1, 0, 1]) if (ridge[at + row + column] > WEAK) open.push(at + row + column);
    }
  }
  context.putImageData(drawn, 0, 0);
  return canvas;
}
