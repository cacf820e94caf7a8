// A picture as it is sent: upright, opaque, no larger than the server takes. Says in a note if it
// had to be scaled for that.

export const MOST_PIXELS = 4 << 20; // what a server takes unless it says otherwise

/** The size that a picture is given, and by how much it is scaled for it. */
export function fit(width, height, multiple, pixels) {
  if (width * height <= pixels) return { width, height, scale: 1 };
  const most = Math.sqrt(pixels / (width * height));
  const down = (side) => Math.max(multiple, Math.floor((side * most) / multiple) * multiple);
  const size = { width: down(width), height: down(height) };
  return { ...size, scale: Math.max(size.width / width, size.height / height) };
}

function canvasOf(width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  return canvas;
}

/** Draws a source at a size that the server takes; what is too large is scaled and centred. */
export function prepare(source, name, { multiple = 8, pixels = MOST_PIXELS } = {}) {
  const to = fit(source.width, source.height, multiple, pixels);
  const canvas = canvasOf(to.width, to.height);
  const context = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
  context.fillStyle = "#fff"; // where the picture is see-through
  context.fillRect(0, 0, to.width, to.height);
  context.imageSmoothingQuality = "high";
  const [width, height] = [source.width * to.scale, source.height * to.scale];
  context.drawImage(source, (to.width - width) / 2, (to.height - height) / 2, width, height);
  const sizes = `from ${source.width} × ${source.height} to ${to.width} × ${to.height}`;
  return { canvas, name, source, note: to.scale < 1 ? `Scaled down ${sizes}.` : "", ...to };
}

/** An empty picture, which is shown until there is something of one that is made. */
export function blank(width, height) {
  const canvas = canvasOf(width, height);
  return { canvas, name: "", source: canvas, note: "", width, height, scale: 1 };
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
