import dataclasses

import numpy as np
import pytest

from training.captions import SHAPE_WORDS, caption, caption_of, caption_of_nothing
from training.masks import mask_anywhere, mask_around, masks_of
from training.paint import paint
from training.scenes import COLOURS, MATERIALS, SHAPES, SIDE, SPLITS, draw_scene


def test_a_seed_gives_the_same_picture_again():
    one, other = (paint(draw_scene("train", 5)) for _ in range(2))
    assert np.array_equal(one.pixels, other.pixels)
    assert np.array_equal(one.masks, other.masks)
    assert not np.array_equal(one.pixels, paint(draw_scene("train", 6)).pixels)


def test_splits_never_meet():
    scenes = [draw_scene(split, seed) for split in SPLITS for seed in range(50)]
    assert len(set(scenes)) == len(scenes)


def test_scenes_use_every_shape_colour_and_material():
    things = [thing for seed in range(300) for thing in draw_scene("train", seed).things]
    assert {thing.shape for thing in things} == set(SHAPES)
    assert {thing.colour for thing in things} == set(COLOURS)
    assert {thing.material for thing in things} == set(MATERIALS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("colour", ["red", "blue"])
def test_a_matte_thing_shows_its_colour_where_its_mask_is(shape: str, colour: str):
    scene = draw_scene("train", 3)
    alone = dataclasses.replace(scene, things=scene.things[:1])
    alone = alone.replaced(0, shape=shape, colour=colour, material="matte")
    picture = paint(alone)
    inside = picture.pixels[picture.masks[0]].mean(0)
    strongest = "rgb"[int(inside.argmax())]
    assert strongest == {"red": "r", "blue": "b"}[colour]
    assert picture.masks[0].sum() > 0.8 * alone.things[0].radius ** 2


def test_masks_show_what_can_be_seen():
    for seed in range(30):
        picture = paint(draw_scene("train", seed))
        assert picture.pixels.shape == (SIDE, SIDE, 3)
        assert picture.masks.sum(0).max() <= 1, "two things seen at one pixel"


def test_an_edit_mask_holds_its_thing():
    for seed in range(40):
        scene = draw_scene("train", seed)
        picture = paint(scene)
        for one in masks_of(scene, seed):
            if one.thing is not None:
                assert not (picture.masks[one.thing] & ~one.mask).any()


def test_masks_leave_something():
    rng = np.random.default_rng(0)
    for _ in range(40):
        assert 0.005 < mask_anywhere(rng).mean() < 0.95
        thing = draw_scene("train", int(rng.integers(99))).things[0]
        assert mask_around(thing, rng).mean() < 0.4


def test_captions_name_colour_and_shape():
    for seed in range(60):
        scene = draw_scene("train", seed)
        rng = np.random.default_rng(seed)
        thing = scene.things[0]
        text = caption_of(thing, scene, rng)
        assert thing.colour in text
        assert any(word in text for word in SHAPE_WORDS[thing.shape])
        whole = caption(scene, rng)
        assert any(one.colour in whole for one in scene.things)
        assert not any(colour in caption_of_nothing(scene, rng).split() for colour in ("pink",))


def test_captions_vary():
    scene = draw_scene("train", 1)
    rng = np.random.default_rng(0)
    assert len({caption(scene, rng) for _ in range(20)}) > 10
