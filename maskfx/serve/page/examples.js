// Pictures to begin with, drawn here: nothing is downloaded. Each painter fills the unit square.

/** Numbers in [0, 1), the same each time. */
function dice(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

function ramp(pen, x0, y0, x1, y1, colours) {
  const gradient = pen.createLinearGradient(x0, y0, x1, y1);
  colours.forEach((colour, i) => gradient.addColorStop(i / (colours.length - 1), colour));
  return gradient;
}

function glow(pen, x, y, radius, colours) {
  const gradient = pen.createRadialGradient(x, y, 0, x, y, radius);
  colours.forEach((colour, i) => gradient.addColorStop(i / (colours.length - 1), colour));
  return gradient;
}

function box(pen, x, y, width, height, fill) {
  pen.fillStyle = fill;
  pen.fillRect(x, y, width, height);
}

function disc(pen, x, y, radius, fill, squash = 1) {
  pen.fillStyle = fill;
  pen.beginPath();
  pen.ellipse(x, y, radius, radius * squash, 0, 0, 2 * Math.PI);
  pen.fill();
}

function shape(pen, points, fill) {
  pen.fillStyle = fill;
  pen.beginPath();
  points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
  pen.closePath();
  pen.fill();
}

/** A ridge from edge to edge, filled down to the bottom. */
function ridge(pen, base, waves, fill) {
  const points = [[0, 1]];
  for (let i = 0; i <= 160; i += 1) {
    const x = i / 160;
    const lift = waves.reduce((sum, [size, turns, at]) => {
      return sum + size * Math.sin(2 * Math.PI * (turns * x + at));
    }, 0);
    points.push([x, base - lift]);
  }
  shape(pen, [...points, [1, 1]], fill);
}

function dunes(pen) {
  box(pen, 0, 0, 1, 1, ramp(pen, 0, 0, 0, 0.7, ["#27406b", "#8a6c8f", "#e59a72", "#f7d39b"]));
  box(pen, 0, 0, 1, 1, glow(pen, 0.68, 0.46, 0.5, ["#fff1c9cc", "#fbc98a55", "#fbc98a00"]));
  disc(pen, 0.68, 0.46, 0.075, "#fff3d6");
  ridge(pen, 0.58, [[0.035, 1.1, 0.1], [0.012, 3.4, 0.3]], "#a8708a");
  const lit = ramp(pen, 0, 0.6, 0, 0.9, ["#c77b5c", "#9a5249"]);
  ridge(pen, 0.66, [[0.05, 0.9, 0.62], [0.01, 4.1, 0]], lit);
  const near = ramp(pen, 0, 0.7, 1, 1, ["#e0965f", "#8f4a3c"]);
  ridge(pen, 0.78, [[0.07, 0.7, 0.05], [0.012, 2.6, 0.4]], near);
  ridge(pen, 0.93, [[0.06, 0.8, 0.45]], ramp(pen, 0, 0.85, 1, 1, ["#6f3a38", "#3b2430"]));
}

function harbour(pen) {
  const roll = dice(4);
  box(pen, 0, 0, 1, 0.55, ramp(pen, 0, 0, 0, 0.55, ["#9fc4d6", "#d9e6e2", "#f4e9d8"]));
  ridge(pen, 0.5, [[0.05, 0.8, 0.7], [0.015, 2.7, 0.2]], "#8fa9ae");
  const walls = ["#d98c5f", "#ead9b8", "#c45f4a", "#f0e6d2", "#7f9a94", "#e0b36a"];
  for (let i = 0, x = 0.03; x < 0.92; i += 1) {
    const [width, height] = [0.085 + 0.04 * roll(), 0.13 + 0.11 * roll()];
    const top = 0.57 - height;
    box(pen, x, top, width, height, walls[i % walls.length]);
    const roof = [[x - 0.006, top], [x + width / 2, top - 0.05], [x + width + 0.006, top]];
    shape(pen, roof, "#7d4437");
    for (let row = top + 0.03; row < 0.53; row += 0.055) {
      box(pen, x + width * 0.2, row, width * 0.2, 0.026, "#3c4a52");
      box(pen, x + width * 0.6, row, width * 0.2, 0.026, "#3c4a52");
    }
    x += width + 0.004;
  }
  box(pen, 0, 0.565, 1, 0.025, "#6d6459");
  box(pen, 0, 0.59, 1, 0.41, ramp(pen, 0, 0.59, 0, 1, ["#8fb0b3", "#4f7f8c", "#2c5666"]));
  for (let i = 0; i < 90; i += 1) {
    const y = 0.6 + 0.39 * roll() ** 1.5;
    box(pen, roll(), y, 0.03 + 0.1 * roll(), 0.0025, roll() > 0.4 ? "#e9f1ee55" : "#1e42504d");
  }
  boat(pen, 0.3, 0.76, 0.2, "#b8412f");
  boat(pen, 0.72, 0.68, 0.12, "#f0ead9");
}

function boat(pen, x, y, size, hull) {
  disc(pen, x, y + size * 0.2, size * 0.62, "#17364033", 0.16);
  box(pen, x - size * 0.02, y - size * 1.1, size * 0.04, size * 1.2, "#4a3a2e");
  shape(pen, [[x + size * 0.05, y - size], [x + size * 0.5, y], [x + size * 0.05, y]], "#fbf6e9");
  const mast = x - size * 0.05;
  shape(pen, [[mast, y - size * 0.8], [x - size * 0.38, y], [mast, y]], "#e9dfc8");
  const [left, right, keel] = [x - size * 0.6, x + size * 0.62, y + size * 0.2];
  shape(pen, [[left, y], [right, y], [x + size * 0.45, keel], [x - size * 0.45, keel]], hull);
}

function fruit(pen) {
  box(pen, 0, 0, 1, 0.64, ramp(pen, 0, 0, 1, 0.64, ["#3f4c4a", "#6c776c", "#4a5551"]));
  box(pen, 0, 0.62, 1, 0.38, ramp(pen, 0, 0.62, 0, 1, ["#b98c5e", "#8a5f3c"]));
  box(pen, 0, 0.62, 1, 0.012, "#d9b183");
  disc(pen, 0.53, 0.85, 0.37, "#4a2f1c55", 0.16);
  const orb = (x, y, radius, light, mid, dark) => {
    disc(pen, x + 0.02, y + radius * 0.9, radius * 0.9, "#3a241644", 0.25);
    const fill = pen.createRadialGradient(x - radius * 0.35, y - radius * 0.4, 0, x, y, radius);
    [light, mid, dark].forEach((colour, i) => fill.addColorStop([0, 0.55, 1][i], colour));
    disc(pen, x, y, radius, fill);
  };
  const glass = ramp(pen, 0.17, 0, 0.4, 0, ["#24433f", "#5d8a80", "#1d3834"]);
  const neck = [[0.25, 0.36], [0.255, 0.17], [0.315, 0.17], [0.32, 0.36]];
  shape(pen, [...neck, [0.395, 0.45], [0.395, 0.8], [0.175, 0.8], [0.175, 0.45]], glass);
  disc(pen, 0.285, 0.8, 0.11, "#1d3834", 0.2);
  box(pen, 0.245, 0.15, 0.08, 0.03, "#c9a36b");
  box(pen, 0.205, 0.47, 0.014, 0.26, "#d8ece555");
  orb(0.52, 0.73, 0.115, "#ffd98a", "#ef9b2d", "#a85a12");
  orb(0.72, 0.71, 0.13, "#f79a7e", "#c8372b", "#6d1415");
  orb(0.62, 0.8, 0.095, "#eef0a0", "#a9b83c", "#5b6a1c");
  box(pen, 0.717, 0.555, 0.012, 0.06, "#4a2f1c");
}

function room(pen) {
  box(pen, 0, 0, 1, 1, ramp(pen, 0, 0, 1, 0.3, ["#e7ddcd", "#d5c7b2"]));
  box(pen, 0, 0.74, 1, 0.26, ramp(pen, 0, 0.74, 0, 1, ["#a97c55", "#7d5838"]));
  for (let x = -0.4; x < 1.4; x += 0.16) {
    const far = 0.5 + (x - 0.5) * 0.7;
    shape(pen, [[far, 0.74], [far + 0.003, 0.74], [x + 0.005, 1], [x, 1]], "#5f42284d");
  }
  box(pen, 0, 0.72, 1, 0.022, "#f3ecdf");
  box(pen, 0.1, 0.12, 0.32, 0.42, "#f8f4ea");
  box(pen, 0.12, 0.14, 0.28, 0.38, ramp(pen, 0, 0.14, 0, 0.52, ["#8db7d3", "#cfe3e6", "#a9c39b"]));
  box(pen, 0.254, 0.14, 0.012, 0.38, "#f8f4ea");
  box(pen, 0.12, 0.32, 0.28, 0.012, "#f8f4ea");
  shape(pen, [[0.3, 0.8], [0.62, 0.8], [0.74, 0.96], [0.38, 0.96]], "#fff6dc38");
  box(pen, 0.66, 0.16, 0.2, 0.24, "#3b342c");
  const painting = ramp(pen, 0.67, 0.17, 0.85, 0.39, ["#c8694a", "#e5b184", "#39565c"]);
  box(pen, 0.675, 0.175, 0.17, 0.21, painting);
  disc(pen, 0.69, 0.9, 0.27, "#3d281855", 0.12);
  for (const x of [0.5, 0.86]) box(pen, x, 0.84, 0.018, 0.06, "#4b3524");
  pen.fillStyle = ramp(pen, 0, 0.54, 0, 0.72, ["#4d7472", "#3f6362"]);
  pen.beginPath();
  pen.roundRect(0.49, 0.53, 0.4, 0.22, 0.04);
  pen.fill();
  pen.fillStyle = ramp(pen, 0, 0.68, 0, 0.86, ["#5c8784", "#456b69"]);
  pen.beginPath();
  pen.roundRect(0.46, 0.66, 0.46, 0.19, 0.035);
  pen.fill();
  box(pen, 0.688, 0.67, 0.004, 0.12, "#34545280");
  shape(pen, [[0.53, 0.58], [0.63, 0.56], [0.65, 0.66], [0.55, 0.68]], "#d9a441");
  box(pen, 0.17, 0.66, 0.012, 0.2, "#3b342c");
  disc(pen, 0.176, 0.86, 0.06, "#3b342c", 0.2);
  disc(pen, 0.176, 0.66, 0.12, "#b98c5e", 0.16);
}

/** Film grain: flat colour is nothing that a model has seen. */
function grain(context, width, height) {
  const roll = dice(9);
  const pixels = context.getImageData(0, 0, width, height);
  for (let i = 0; i < pixels.data.length; i += 4) {
    const lift = 10 * (roll() + roll() - 1);
    for (let c = 0; c < 3; c += 1) pixels.data[i + c] += lift;
  }
  context.putImageData(pixels, 0, 0);
}

export const EXAMPLES = [
  { name: "Dunes", paint: dunes, prompt: "a small white tent, warm light inside" },
  { name: "Harbour", paint: harbour, prompt: "a lighthouse with red and white stripes" },
  { name: "Still life", paint: fruit, prompt: "a blue ceramic vase" },
  { name: "Room", paint: room, prompt: "a tall potted plant" },
];

export function draw(example, width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
  context.scale(width, height);
  example.paint(context);
  grain(context, width, height);
  return canvas;
}
