// Pictures that are chosen, pasted or dropped, told to whoever opens them.

const pictureIn = (list) => [...(list ?? [])].find((file) => file.type.startsWith("image/"));
const brings = (event) => event.dataTransfer?.types.includes("Files"); // and not some text

/** Calls open(file, name) with each picture that comes in. */
export function receive(input, open) {
  const { classList } = document.body;

  input.addEventListener("change", () => {
    const [file] = input.files;
    input.value = ""; // the same file may be chosen again
    if (file) open(file, file.name);
  });

  document.addEventListener("paste", (event) => {
    const file = pictureIn(event.clipboardData?.files);
    if (file) open(file, "Pasted picture");
  });

  document.addEventListener("dragover", (event) => {
    if (!brings(event)) return;
    event.preventDefault();
    classList.add("dragging");
  });

  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) classList.remove("dragging");
  });

  document.addEventListener("drop", (event) => {
    if (!brings(event)) return;
    event.preventDefault();
    classList.remove("dragging");
    const { files } = event.dataTransfer;
    const file = pictureIn(files) ?? files[0];
    if (file) open(file, file.name);
  });
}
