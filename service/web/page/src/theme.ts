// Light or dark: as the system says, unless the user says otherwise here.

import { signal } from "@preact/signals";

const KEY = "moored.theme";

export type Theme = "system" | "light" | "dark";

const stored = localStorage.getItem(KEY);

export const theme = signal<Theme>(stored === "light" || stored === "dark" ? stored : "system");

/** Counts changes of the colours: what is drawn by hand follows it. */
export const colours = signal(0);

export function applyTheme(): void {
  const chosen = theme.value;
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  colours.value++;
}

export function chooseTheme(chosen: Theme): void {
  theme.value = chosen;
  if (chosen === "system") localStorage.removeItem(KEY);
  else localStorage.setItem(KEY, chosen);
  applyTheme();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
