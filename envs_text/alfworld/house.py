"""What a generated house holds: rooms, the places of things, and what can be done with them.

The weights are rounded from the placements in the official training games, so that a policy trained on generated games
meets the same habits there: bread lies on counters and tables, a hidden mug is most likely in a cabinet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Room:
    """A kind of room.

    Attributes:
        core: Receptacle types that every room of the kind has.
        extra: Further receptacles, drawn from without replacement.
        things: Object types found in it.
    """

    core: tuple[str, ...]
    extra: tuple[str, ...]
    things: tuple[str, ...]


def _counts(text: str) -> tuple[tuple[str, int], ...]:
    """``"Desk 2 Bed"`` -> (("Desk", 2), ("Bed", 1))."""
    found: list[tuple[str, int]] = []
    for word in text.split():
        if word.isdigit():
            found[-1] = (found[-1][0], int(word))
        else:
            found.append((word, 1))
    return tuple(found)


def _types(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _room(core: str, extra: str, things: str) -> Room:
    return Room(
        core=tuple(core.split()),
        extra=tuple(kind for kind, count in _counts(extra) for _ in range(count)),
        things=tuple(things.split()),
    )


ROOMS: dict[str, Room] = {
    "kitchen": _room(
        "CounterTop Cabinet Fridge Microwave SinkBasin",
        "Cabinet 9 Drawer 5 StoveBurner 4 CounterTop 2 DiningTable 2 Shelf 2 GarbageCan CoffeeMachine SideTable",
        "Apple Book Bowl Bread ButterKnife Cup DishSponge Egg Fork Glassbottle Kettle Knife Ladle Lettuce Mug Pan"
        " PepperShaker Plate Pot Potato SaltShaker SoapBottle Spatula Spoon Statue Tomato Vase WineBottle",
    ),
    "bathroom": _room(
        "CounterTop Cabinet SinkBasin Toilet",
        "Cabinet 5 Drawer 5 Shelf 3 HandTowelHolder 2 TowelHolder 2 BathtubBasin GarbageCan ToiletPaperHanger Cart"
        " SideTable SinkBasin Dresser",
        "Candle Cloth DishSponge HandTowel SoapBar SoapBottle SprayBottle TissueBox ToiletPaper Towel",
    ),
    "bedroom": _room(
        "Bed Desk Drawer",
        "Drawer 9 Shelf 5 SideTable 3 Dresser 2 Cabinet 3 GarbageCan ArmChair Safe DiningTable",
        "AlarmClock Book Bowl Box CD CellPhone CreditCard KeyChain Laptop Mug Pen Pencil Pillow RemoteControl Statue"
        " TeddyBear TissueBox Vase",
    ),
    "living room": _room(
        "Sofa CoffeeTable SideTable",
        "Drawer 7 Shelf 5 SideTable 2 ArmChair 3 DiningTable 2 Cabinet 3 Dresser TVStand GarbageCan Ottoman Desk Safe",
        "Book Box Candle CellPhone CreditCard KeyChain Laptop Newspaper Pen Pencil Pillow Plate RemoteControl Statue"
        " TissueBox Vase Watch",
    ),
}

PLACES: dict[str, dict[str, int]] = {
    thing: dict(_counts(places))
    for thing, places in {
        "AlarmClock": "Desk 4 SideTable 3 Shelf 2 Dresser 2 DiningTable",
        "Apple": "Fridge 3 CounterTop 3 DiningTable 2 Microwave 2 GarbageCan 2 SinkBasin 2 SideTable",
        "Book": "Bed 5 Desk 2 Drawer 2 Dresser 2 Sofa 2 SideTable 2 CoffeeTable 2 CounterTop 2 DiningTable 2"
        " Cabinet Shelf ArmChair Ottoman",
        "Bowl": "Cabinet 4 Fridge 2 CounterTop 2 DiningTable 2 Desk 3 Shelf 2 Microwave SinkBasin SideTable Dresser",
        "Box": "DiningTable 3 Sofa 3 CoffeeTable 2 Dresser 2 Shelf 2 SideTable Desk Cabinet ArmChair Ottoman",
        "Bread": "CounterTop 6 DiningTable 3 Fridge 2 Microwave SideTable GarbageCan",
        "ButterKnife": "CounterTop 5 DiningTable 3 Drawer SinkBasin SideTable",
        "CD": "Drawer 4 Desk 2 Dresser 2 SideTable 2 Shelf GarbageCan Cabinet Safe DiningTable",
        "Candle": "Toilet 3 CounterTop 3 Cabinet 2 SideTable 2 CoffeeTable 2 DiningTable 2 Shelf Drawer Cart Dresser",
        "CellPhone": "Bed 4 Desk 2 Drawer 2 Dresser 2 ArmChair 2 SideTable CoffeeTable Sofa Shelf Safe DiningTable",
        "Cloth": "BathtubBasin 3 Cabinet 3 CounterTop 2 Drawer 2 SinkBasin Shelf GarbageCan Toilet Cart SideTable"
        " Dresser",
        "CreditCard": "Drawer 4 CoffeeTable 3 SideTable 2 Sofa 2 Desk 2 Shelf 2 Dresser 2 ArmChair 2 Safe Ottoman"
        " DiningTable",
        "Cup": "Cabinet 3 CounterTop 2 Fridge 2 DiningTable 2 SinkBasin Microwave Shelf SideTable",
        "DeskLamp": "Desk 4 SideTable 4 Dresser 2 Shelf",
        "DishSponge": "CounterTop 3 Cabinet 3 DiningTable 2 Drawer 2 BathtubBasin 2 Toilet 2 SinkBasin GarbageCan"
        " Shelf Cart SideTable",
        "Egg": "Fridge 3 CounterTop 3 SinkBasin 2 GarbageCan 2 Microwave DiningTable SideTable",
        "FloorLamp": "SideTable 3 CoffeeTable TVStand Dresser",
        "Fork": "CounterTop 5 DiningTable 3 Drawer 2 SinkBasin SideTable",
        "Glassbottle": "CounterTop 3 Cabinet 3 DiningTable 2 SinkBasin Fridge Shelf Microwave",
        "HandTowel": "HandTowelHolder 8 CounterTop Cabinet Drawer Shelf",
        "Kettle": "StoveBurner 4 CounterTop 3 Cabinet 2 DiningTable SinkBasin Shelf SideTable",
        "KeyChain": "Drawer 3 Sofa 2 Desk 2 SideTable 2 Dresser 2 CoffeeTable Shelf ArmChair DiningTable Safe Ottoman",
        "Knife": "CounterTop 5 DiningTable 2 Drawer 2 SinkBasin SideTable",
        "Ladle": "CounterTop 4 Drawer 2 Cabinet 2 DiningTable SinkBasin",
        "Laptop": "Bed 6 DiningTable 3 Sofa 3 Desk 2 CoffeeTable 2 SideTable ArmChair Dresser Ottoman",
        "Lettuce": "CounterTop 4 DiningTable 3 Fridge 2 SinkBasin SideTable GarbageCan",
        "Mug": "CounterTop 3 Cabinet 3 CoffeeMachine 2 Fridge 2 Desk 3 SideTable 2 DiningTable Microwave Shelf"
        " Dresser SinkBasin",
        "Newspaper": "Sofa 3 DiningTable 2 CoffeeTable 2 SideTable Shelf ArmChair Drawer GarbageCan Cabinet"
        " Ottoman Dresser",
        "Pan": "StoveBurner 5 CounterTop 3 Cabinet DiningTable Fridge SinkBasin SideTable",
        "Pen": "Desk 3 SideTable 2 Dresser 2 Drawer 2 Shelf CoffeeTable DiningTable GarbageCan",
        "Pencil": "Desk 2 SideTable 2 Drawer 2 Dresser 2 Shelf CoffeeTable DiningTable GarbageCan",
        "PepperShaker": "CounterTop 3 Cabinet 3 Drawer 2 DiningTable Shelf SideTable",
        "Pillow": "Bed 6 Sofa 6 ArmChair 2 Ottoman",
        "Plate": "Cabinet 4 CounterTop 3 DiningTable 2 Fridge SinkBasin Microwave Shelf CoffeeTable SideTable",
        "Pot": "StoveBurner 6 CounterTop 2 Fridge DiningTable Cabinet SinkBasin Shelf SideTable",
        "Potato": "CounterTop 3 Fridge 3 DiningTable 2 Microwave SinkBasin GarbageCan SideTable",
        "RemoteControl": "Sofa 3 CoffeeTable 2 Drawer 2 Desk 2 ArmChair Dresser SideTable Shelf DiningTable Ottoman",
        "SaltShaker": "Cabinet 3 CounterTop 3 Drawer 2 DiningTable 2 Shelf SideTable",
        "SoapBar": "CounterTop 3 SinkBasin 2 Toilet 2 Cabinet 2 Drawer Shelf BathtubBasin GarbageCan Cart SideTable",
        "SoapBottle": "CounterTop 3 Cabinet 3 Toilet 3 DiningTable 2 GarbageCan Shelf Drawer Cart SideTable",
        "Spatula": "CounterTop 5 DiningTable 3 Drawer 2 SinkBasin SideTable",
        "Spoon": "CounterTop 3 Drawer 3 DiningTable 2 SinkBasin 2 SideTable",
        "SprayBottle": "CounterTop 3 Toilet 2 Cabinet 2 GarbageCan Shelf Drawer Cart SideTable Dresser",
        "Statue": "Shelf 3 DiningTable 2 SideTable 2 CoffeeTable 2 CounterTop 2 Dresser Desk Safe",
        "TeddyBear": "Bed",
        "TissueBox": "SideTable 3 Shelf 3 DiningTable 2 CoffeeTable 2 Desk 2 CounterTop 2 Drawer Toilet Cabinet"
        " Cart Dresser",
        "ToiletPaper": "Toilet 3 Cabinet 2 CounterTop 2 ToiletPaperHanger 2 Shelf Drawer GarbageCan Cart SideTable"
        " Dresser",
        "Tomato": "CounterTop 3 Fridge 3 DiningTable 2 GarbageCan SinkBasin Microwave SideTable",
        "Towel": "TowelHolder",
        "Vase": "Shelf 5 CounterTop 2 DiningTable 2 Cabinet 2 CoffeeTable SideTable Desk Dresser Safe",
        "Watch": "CoffeeTable 2 DiningTable 2 SideTable 2 Dresser Shelf Drawer Desk",
        "WineBottle": "CounterTop 3 DiningTable 3 Cabinet 2 GarbageCan Shelf Fridge SideTable",
    }.items()
}
"""PLACES[object type][receptacle type]: how readily an object is found there; its keys are also what can hold it."""

OPENABLE = _types("Cabinet Drawer Fridge Microwave Safe")
LAMPS = ("DeskLamp", "FloorLamp")
RECEPTACLE_OBJECTS = _types("Bowl Box Cup Mug Pan Plate Pot")
SLICEABLE = _types("Apple Bread Egg Lettuce Potato Tomato")
KNIVES = _types("ButterKnife Knife")
CLEANABLE = _types(
    "Apple Bowl ButterKnife Cloth Cup DishSponge Egg Fork Kettle Knife Ladle Lettuce Mug Pan Plate Pot Potato SoapBar"
    " Spatula Spoon Tomato"
)
HEATABLE = _types("Apple Bread Cup Egg Mug Plate Potato Tomato")
COOLABLE = _types("Apple Bowl Bread Cup Egg Lettuce Mug Pan Plate Pot Potato Tomato WineBottle")
