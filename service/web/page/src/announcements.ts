// What is said once: shown for a while, and read out by screen readers.

import { signal } from "@preact/signals";

const SHOWN_MS = 8000;

export interface Announcement {
  id: number;
  text: string;
  isError: boolean;
}

export const announcements = signal<Announcement[]>([]);

let last = 0;

export function announce(text: string, isError = false): void {
  const id = ++last;
  announcements.value = [...announcements.value.slice(-2), { id, text, isError }];
  setTimeout(() => dismiss(id), isError ? 2 * SHOWN_MS : SHOWN_MS);
}

export function dismiss(id: number): void {
  announcements.value = announcements.value.filter((each) => each.id !== id);
}
