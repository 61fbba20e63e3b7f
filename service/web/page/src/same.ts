// Whether two messages say the same, so that what did not change is not drawn again.

/** Fields that change with the clock alone: they count as changed in these steps. */
const STEPS_MS: Record<string, number> = {
  ageMs: Infinity,
  uptimeMs: Infinity,
  idleMs: 5000,
  expiresInMs: 1000,
  resultsForMs: 60000,
};

export function isSame(one: unknown, other: unknown): boolean {
  if (one === other) return true;
  if (typeof one !== "object" || typeof other !== "object" || !one || !other) return false;
  if (Array.isArray(one)) {
    return (
      Array.isArray(other) && one.length === other.length && one.every((each, index) => isSame(each, other[index]))
    );
  }
  const a = one as Record<string, unknown>;
  const b = other as Record<string, unknown>;
  const names = Object.keys(a);
  return (
    names.length === Object.keys(b).length &&
    names.every((name) => {
      const step = STEPS_MS[name];
      if (step === undefined) return isSame(a[name], b[name]);
      if (step === Infinity) return true;
      return Math.floor(Number(a[name]) / step) === Math.floor(Number(b[name]) / step);
    })
  );
}
