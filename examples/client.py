"""Send an edit to a running server and save the picture.

    .venv/bin/maskfx serve                      # in another terminal
    .venv/bin/python examples/client.py         # or with the server's URL

Writes the result to `demo-out/client.png`. The `openai` package works too, with
`base_url="http://127.0.0.1:8000/v1"`; here the request is visible.
"""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

import httpx

from maskfx.shipped import FOLDER

EXAMPLE = FOLDER / "unet" / "example"
OUT = Path("demo-out")


def main(url: str = "http://127.0.0.1:8000") -> None:
    files = {
        "image": (EXAMPLE / "picture.png").read_bytes(),
        "mask_image": (EXAMPLE / "mask.png").read_bytes(),  # white is edited
    }
    fields = {"prompt": "a shiny blue ball", "seed": "7"}
    key = os.environ.get("MASKFX_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.post(
            f"{url}/v1/images/edits", files=files, data=fields, headers=headers, timeout=600
        )
    except httpx.ConnectError:
        sys.exit(f"no server at {url}; start one with: maskfx serve")
    if response.is_error:
        sys.exit(f"{response.status_code}: {response.json()['error']['message']}")
    [made] = response.json()["data"]
    OUT.mkdir(exist_ok=True)
    (OUT / "client.png").write_bytes(base64.b64decode(made["b64_json"]))
    told = made["maskfx"]
    print(
        f"{told['steps']} steps in {told['seconds']:.1f} s, {told['mask_ratio']:.0%} of the sites "
        f"computed: {OUT / 'client.png'}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
