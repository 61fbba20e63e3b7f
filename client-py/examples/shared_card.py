#!/usr/bin/env python3
"""Two clients share a card: one keeps memory for itself, and the other is shown it if it waits.

python shared_card.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

import moored

model = sys.argv[1] if len(sys.argv) > 1 else None


async def main() -> None:
    """Reserves the memory of the first card, and gives it back once somebody waits for it."""
    async with (
        moored.AsyncClient(client_id="renderer") as renderer,
        moored.AsyncClient(client_id="artist") as artist,
    ):
        card = (await renderer.status()).cards[0]
        reserved = await renderer.reserve(card.memory.usable, card=card.id, label="renderer")
        print(f"renderer: keeps {reserved.bytes / 2**30:.1f} GiB of {card.id}")
        try:
            async with artist.stream_image("a cat", model=model, patience_s=60) as stream:
                async for event in stream:
                    print(f"artist: {moored.describe(event)}")
                    if isinstance(event, moored.Waiting) and reserved.released is None:
                        print("renderer: gives it back")
                        await reserved.release()
                path = (await stream.result()).save("shared.png")
        finally:
            # A reservation that nobody waited for would last until it expires.
            if reserved.released is None:
                await reserved.release()
        print(f"artist: wrote {path}")


asyncio.run(main())
