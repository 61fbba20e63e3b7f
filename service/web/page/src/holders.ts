// Who holds the memory of a card beside this service.

import type { CardStatus } from "./proto/moored/v1/residency_pb";

export interface ForeignHolder {
  name: string;
  bytes: number;
}

/** Who holds the foreign bytes: the service names them first, and what is its own after them. */
export function foreignHolders(card: CardStatus): ForeignHolder[] {
  let unnamed = Number(card.memory?.foreign ?? 0);
  const found: ForeignHolder[] = [];
  for (const holder of card.holders) {
    if (unnamed <= 0) break;
    const bytes = Math.min(unnamed, Number(holder.bytes));
    unnamed -= bytes;
    found.push({ name: holder.pid ? `${holder.name} (process ${holder.pid})` : holder.name, bytes });
  }
  if (unnamed > 0) found.push({ name: "another program", bytes: unnamed });
  return found;
}
