// A picture as it is sent: upright, opaque, no larger than the server takes, its sides multiples
// of what the model takes. Says in a note what had to be changed for that.

export const MOST_PIXELS = 4 << 20; // what a server takes unless it says otherwise

/** The size that a picture is given, and by how much it is scaled for it. */
export function fit(width, height, multiple, pixels) {
  const down = (side) => Math.floor(side / multiple) * multiple;
  const scale = Math.min(1, Math.sqrt(pixels / (width * height)));
  const size = { width: down(width * scale), height: down(height * scale) };
  const scaled = scale < 1 ? Math.max(size.width / width, size.height / height) : 1;
  return { ...size, scale: scaled };
}

function noteOf(from, to) {
  const sizes = `from ${from.width} × ${from.height} to ${to.width} × ${to.height}`;
  if (to.scale < 1) return `Scaled down ${sizes}.`;
  if (from.width === to.width && from.height === to.height) return "";
  return `Trimmed at its edges ${sizes}: the model takes multiples.`;
}

function canvasOf(width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  return canvas;
}

/** Draws a source, centred, at the size that the server takes. Throws if it is too small. */
export function prepare(source, name, { multiple = 8, pixels = MOST_PIXELS } = {}) {
  const to = fit(source.width, source.height, multiple, pixels);
  if (!to.width || !to.height) {
    throw new Error(
      `This picture has ${source.width} × ${source.height} pixels; ` +
        `the model needs at least ${multiple} × ${multiple}.`,
    );
  }
  const canvas = canvasOf(to.width, to.height);
  const context = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
  context.fillStyle = "#fff"; // where the picture is see-through
  context.fillRect(0, 0, to.width, to.height);
  context.imageSmoothingQuality = "high";
  const [width, height] = [source.width * to.scale, source.height * to.scale];
  const left = to.scale < 1 ? (to.width - width) / 2 : Math.floor((to.width - width) / 2);
  const top = to.scale < 1 ? (to.height - height) / 2 : Math.floor((to.height - height) / 2);
  context.drawImage(source, left, top, width, height);
  return { canvas, name, source, note: noteOf(source, to), ...to };
}

/** Decodes a file or a blob, turned as its EXIF says. */
export async function decode(blob) {
  try {
    return await createImageBitmap(blob);
  } catch {
    throw new Error("This file couldn’t be read as a picture. PNG, JPEG and WebP work.");
  }
}

export function pngOf(canvas) {
  return new Promise((resolve, reject) => {
    canvas.toBlob(
      (blob) => (blob ? resolve(blob) : reject(new Error("The picture couldn’t be encoded."))),
      "image/png",
    );
  });
}

/** A small copy that covers a square. */
export function thumbnail(source, side) {
  const canvas = canvasOf(side, side);
  const scale = Math.max(side / source.width, side / source.height);
  const [width, height] = [source.width * scale, source.height * scale];
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(source, (side - width) / 2, (side - height) / 2, width, height);
  return canvas;
}
