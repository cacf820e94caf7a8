// Asks for the server's key, gives it to the api, and goes on with what needed it.

export class KeyDialog {
  constructor(dialog, api) {
    this.dialog = dialog;
    this.api = api;
    this.input = dialog.querySelector("input");
    this.text = dialog.querySelector("p");
    this.then = null;
    dialog.querySelector("form").addEventListener("submit", () => this.take());
    dialog.querySelector("[type=button]").addEventListener("click", () => dialog.close());
  }

  ask(then) {
    this.then = then;
    this.input.value = this.api.key;
    this.text.textContent = this.api.key
      ? "The server doesn’t accept this key. Another one?"
      : "This server wants a key. It is kept in this tab only.";
    if (!this.dialog.open) this.dialog.showModal();
    this.input.select();
  }

  take() {
    this.api.key = this.input.value.trim();
    this.then();
  }
}
