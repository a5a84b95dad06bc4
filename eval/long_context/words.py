"""Words that names are made of: `amber-anchor`."""

from __future__ import annotations

_ADJECTIVES = """
able aged amber ample arctic autumn azure bold brave brisk bronze calm candid careful clever
copper coral cosy crisp curly daring deep distant eager early eastern elder elegant fabled fair
famous fancy fast fearless final firm fluffy foggy fond frank fresh frosty gentle giant glad
golden grand hasty hidden hollow honest humble icy jolly keen kind late lazy lively lofty lonely
loud lucky lunar magic mellow mild misty modest narrow neat noble northern odd pale patient
plain polite proud quick quiet rapid rare rural rustic sandy scarlet secret shady sharp shiny
silent silver simple sleepy slim smooth snowy solar solid southern spicy stable steady stormy
sturdy sunny swift tall tame tidy tiny tranquil upper velvet vivid warm western wild windy wise
wooden young
"""
_NOUNS = """
anchor apple arrow badger ballad bamboo banner barrel basket beacon beetle bell blanket boat
bottle bridge bucket button cabin camel candle canyon carpet castle cedar chapel cherry chimney
clock cloud comet compass cottage cradle cricket crystal curtain dagger daisy dolphin donkey
dragon drum eagle engine falcon feather ferry fiddle forest fountain fox garden glacier goblet
guitar hammer harbor hazel hedge helmet heron hill island ivy jacket kettle kite ladder lagoon
lantern lemon lizard lobster maple marble meadow mirror mitten monkey mountain needle oasis
olive orchard otter owl oyster paddle palace parrot pebble pepper pigeon pillow planet pocket
prairie puzzle quilt rabbit raven ribbon river rocket saddle sailor salmon shovel spider
squirrel statue table temple thistle ticket tiger tower trumpet tunnel turtle valley violin
wagon walnut whistle willow window zebra
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())
