"""What people would write about a scene, or about one thing that they want in it."""

from __future__ import annotations

import numpy as np

from training.scenes import SIDE, Backdrop, Scene, Thing

Words = tuple[str, ...]

SHAPE_WORDS: dict[str, Words] = {
    "ball": ("ball", "ball", "sphere"),
    "cube": ("cube", "cube", "box"),
    "cone": ("cone",),
    "cylinder": ("cylinder", "cylinder", "tube"),
    "star": ("star",),
    "heart": ("heart",),
    "ring": ("ring", "ring", "donut"),
    "cross": ("cross", "cross", "plus sign"),
}
MATERIAL_WORDS: dict[str, Words] = {
    "matte": ("", "", "matte", "plain"),
    "shiny": ("shiny", "glossy"),
    "metal": ("metal", "metallic"),
    "striped": ("striped", "stripy"),
    "dotted": ("dotted", "spotted", "polka dot"),
}
SIZE_WORDS: dict[str, Words] = {
    "small": ("small", "little", "tiny"),
    "medium": ("", "medium sized"),
    "large": ("large", "big", "huge"),
}
BELOW_WORDS: dict[str, Words] = {
    "grass": ("on the grass", "in a meadow", "on a green field", "on grass"),
    "sand": ("on the sand", "in the desert", "on sand"),
    "snow": ("in the snow", "on a snowy field", "on snow"),
    "stone": ("on grey ground", "on a stone floor", "on the street"),
    "sea": ("on the water", "on the sea", "in front of the sea"),
    "wood": ("on a wooden floor", "on the wooden floor", "on wood"),
    "tiles": ("on a tiled floor", "on a checkered floor", "on tiles"),
    "carpet": ("on a carpet", "on the carpet", "on a soft carpet"),
}
ABOVE_WORDS: dict[str, Words] = {
    "clear": ("under a blue sky", "on a sunny day", "under a clear sky"),
    "cloudy": ("under a cloudy sky", "on a cloudy day", "under clouds"),
    "sunset": ("at sunset", "in the evening", "under a red sky"),
    "night": ("at night", "under the stars", "under a dark sky"),
    "plain": ("in front of a wall", "in a room", "in a plain room"),
    "brick": ("in front of a brick wall", "by a brick wall"),
    "striped": ("in front of a striped wall", "in a room with striped wallpaper"),
}
OPENINGS = ("", "", "", "", "a photo of ", "a picture of ", "an image of ", "there is ")


def caption(scene: Scene, rng: np.random.Generator) -> str:
    """The whole scene, or most of it."""
    things = list(scene.things)
    order = rng.permutation(len(things))
    if len(things) > 1 and rng.random() < 0.15:
        order = order[:-1]  # people don't list everything
    named = [things[i] for i in order]
    with_place = len(named) == 1 or rng.random() < 0.5
    phrases = [name_of(one, rng) + (place_of(one, rng) if with_place else "") for one in named]
    text = phrases[0]
    if len(named) == 2 and not with_place:
        text = f"{phrases[0]} {relation(named[0], named[1], rng)} {phrases[1]}"
    elif len(phrases) > 1:
        text = ", ".join(phrases[:-1]) + " and " + phrases[-1]
    text = one_of(OPENINGS, rng) + text
    return text + surroundings(scene.backdrop, rng, 0.75)


def caption_of(thing: Thing, scene: Scene, rng: np.random.Generator) -> str:
    """One thing, as the prompt of an edit names it."""
    text = one_of(OPENINGS, rng) + name_of(thing, rng)
    return text + surroundings(scene.backdrop, rng, 0.25)


def caption_of_nothing(scene: Scene, rng: np.random.Generator) -> str:
    """The backdrop alone."""
    words = surroundings(scene.backdrop, rng, 1.0).strip()
    return one_of(("nothing ", "an empty place ", "empty background ", ""), rng) + words


def name_of(thing: Thing, rng: np.random.Generator) -> str:
    size = one_of(SIZE_WORDS[thing.size], rng) if rng.random() < 0.5 else ""
    material = one_of(MATERIAL_WORDS[thing.material], rng) if rng.random() < 0.8 else ""
    looks = [thing.colour, material] if rng.random() < 0.25 else [material, thing.colour]
    words = " ".join(w for w in (size, *looks, one_of(SHAPE_WORDS[thing.shape], rng)) if w)
    if rng.random() < 0.08:
        return words
    return ("an " if words[0] in "aeiou" else "a ") + words


def place_of(thing: Thing, rng: np.random.Generator) -> str:
    """Left, right or middle; often left unsaid."""
    if rng.random() < 0.35:
        return ""
    if thing.floating and rng.random() < 0.5:
        return one_of((" in the air", " floating"), rng)
    third = int(3 * thing.x / SIDE)
    return one_of(
        (
            (" on the left", " on the left side", " to the left"),
            (" in the middle", " in the center"),
            (" on the right", " on the right side", " to the right"),
        )[third],
        rng,
    )


def relation(one: Thing, other: Thing, rng: np.random.Generator) -> str:
    across, down = one.x - other.x, (one.y + one.radius) - (other.y + other.radius)
    if rng.random() < 0.3:
        return one_of(("and", "next to", "with"), rng)
    if abs(across) >= abs(down):
        return "to the left of" if across < 0 else "to the right of"
    return "behind" if down < 0 else "in front of"


def surroundings(backdrop: Backdrop, rng: np.random.Generator, chance: float) -> str:
    words = []
    if rng.random() < chance:
        words.append(one_of(BELOW_WORDS[backdrop.below], rng))
    if rng.random() < chance:
        words.append(one_of(ABOVE_WORDS[backdrop.above], rng))
    if backdrop.hills and rng.random() < chance * 0.5:
        words.append(one_of(("with hills behind", "in front of hills"), rng))
    return "".join(" " + word for word in words)


def one_of(words: Words, rng: np.random.Generator) -> str:
    return words[int(rng.integers(len(words)))]
