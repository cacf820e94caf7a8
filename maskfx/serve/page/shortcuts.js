// Keys that work anywhere on the page, but for those that someone is writing with.

const WRITING = "textarea, select, input:not([type=range])";

/** Runs the command of a key: "b", "command z" (Ctrl or Cmd), "command shift z". */
export function listen(commands) {
  document.addEventListener("keydown", (event) => {
    if (event.altKey || document.querySelector("dialog[open]")) return;
    const command = event.ctrlKey || event.metaKey;
    const shift = command && event.shiftKey; // without command it is part of the sign, as in "+"
    const name = [command && "command", shift && "shift", event.key.toLowerCase()];
    const run = commands[name.filter(Boolean).join(" ")];
    const anywhere = event.key === "Escape" || (command && event.key === "Enter");
    if (!run || (event.target.matches(WRITING) && !anywhere)) return;
    if (event.key !== "Escape") event.preventDefault(); // which closes other things too
    run();
  });
}
