//! The planner: which moves make room for a stage, or why it has to wait, or that it can never run on this card.
//!
//! One pass over the ledger and one sort of the eviction candidates, no nested loops: a thousand components cost well
//! under a millisecond.

mod holes;

use serde::{Deserialize, Serialize};

use crate::layout::NoHole;
use crate::ledger::{Claim, Ledger};
use crate::nouns::{Bytes, Component, ComponentId, Millis, StageNeed};
use crate::parts::Part;
use crate::resident::{Resident, ResidentState};
use holes::Holes;

/// Measured: 40 ms until the driver shows 21.5 GB as free on an H100; a few milliseconds at least.
const EVICT_SECONDS: f64 = 0.005;
const EVICT_SECONDS_PER_BYTE: f64 = 0.040 / 21.5e9;
const TRIM_SECONDS: f64 = 0.005;

/// One change to the card's memory. Moves are carried out in order, each bracketed by ledger entries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Move {
    Evict(Component),
    /// Load a component: all of it, or a part.
    Load(Component, Part),
    /// Keep another part of a component on the card: more of its blocks, or fewer.
    Resize(Component, Part),
    /// Return slack to the driver, so that component pools can allocate it.
    Trim,
}

/// How much memory that a stage does not need may stay resident while it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Evict only as much as the stage's peak needs.
    #[default]
    Shared,
    /// One large component at a time: every large component (see [`large_from`]) that the stage does not need is
    /// evicted, and slack is trimmed, before anything is loaded.
    Exclusive,
}

/// The reason for which a stage waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitCause {
    /// Late bytes: freed by us, not shown as free by the driver yet.
    LateEviction,
    /// Our own components and scratch that are in use, held by a client, loading or being evicted.
    Leases,
    /// Memory held by other processes.
    Foreign,
    /// Memory reserved for another program.
    Reservation,
}

impl WaitCause {
    /// Public name: `late_eviction`, `leases`, `foreign`, `reservation`.
    pub fn as_str(self) -> &'static str {
        match self {
            WaitCause::LateEviction => "late_eviction",
            WaitCause::Leases => "leases",
            WaitCause::Foreign => "foreign",
            WaitCause::Reservation => "reservation",
        }
    }
}

/// The planner's decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The stage can run after these moves; at once if there are none.
    Run {
        /// Evictions and shrinking parts, then a trim if one is needed, then loads and growing parts.
        moves: Vec<Move>,
    },
    /// The stage does not fit now, and would if claimed memory were released.
    Wait {
        /// Bytes missing after all idle components are evicted. Zero where a needed component is still loading.
        short: Bytes,
        /// The claim that has to be released.
        cause: WaitCause,
    },
    /// The stage does not fit on this card, whatever is evicted.
    Never {
        needed: Bytes,
        /// The card less context, workspaces, headroom (the card's or the stage's), leaked bytes, and pins that the
        /// stage does not need.
        capacity: Bytes,
    },
}

/// A plan for a request that allows low memory: it runs even if memory may be short.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LowMemory {
    /// Moves that free as much as is needed, or as much as is evictable.
    pub moves: Vec<Move>,
    /// Predicted shortage at the stage's peak. Zero: an ordinary plan.
    pub short: Bytes,
}

/// The size in bytes from which a component is *large* on a card of `total` bytes: 1 GiB, or a sixteenth of a small
/// card.
pub fn large_from(total: Bytes) -> Bytes {
    Bytes::gib(1).min(Bytes(total.0 / 16))
}

/// Decides whether a stage can run on this card, and which moves have to come first.
///
/// Its components are wanted whole. Where they cannot be, or where a stage with a single pass over its blocks would evict others
/// for it, those that have parts get what the card has for them, and the rest of their blocks is streamed: in a single pass a block
/// crosses the link once either way.
pub fn plan(ledger: &Ledger, need: &StageNeed, policy: Policy, now: Millis) -> Verdict {
    decide(ledger, need, policy, now).0
}

/// A plan that never refuses: it frees as much as is evictable and reports the shortage. Components that have parts are streamed
/// where [`plan`] would have them streamed.
pub fn plan_low_memory(ledger: &Ledger, need: &StageNeed, policy: Policy, now: Millis) -> LowMemory {
    let (_, chosen) = decide(ledger, need, policy, now);
    let ask = Ask::of_stage(ledger, need, &chosen);
    let survey = Survey::of(ledger, &ask);
    let short = survey.missing(&ask) - survey.evictable();
    match survey.holes(&ask, policy, now) {
        None => LowMemory {
            moves: survey.moves(&ask, policy, now),
            short,
        },
        Some(holes) => survey.low_memory_with_holes(&ask, policy, now, holes),
    }
}

/// The parts of a stage's components, in their order.
type Chosen = Vec<Part>;

/// The verdict, with the parts of the components that it is about.
fn decide(ledger: &Ledger, need: &StageNeed, policy: Policy, now: Millis) -> (Verdict, Chosen) {
    let whole: Chosen = need.components.iter().map(|c| whole_of(ledger, c)).collect();
    let verdict = verdict_on(ledger, need, &whole, policy, now);
    let streams_instead = match &verdict {
        Verdict::Run { moves } => need.passes <= 1 && moves.iter().any(|m| freed_by(ledger, m) > Bytes::ZERO),
        Verdict::Wait { short, .. } => *short > Bytes::ZERO,
        Verdict::Never { .. } => true,
    };
    if !streams_instead || need.components.iter().all(|c| c.parts.sizes().is_empty()) {
        return (verdict, whole);
    }
    let mut in_parts = decide_in_parts(ledger, need, true, policy, now);
    if !matches!(in_parts.0, Verdict::Run { .. }) {
        in_parts = decide_in_parts(ledger, need, false, policy, now);
    }
    let is_late = matches!(
        verdict,
        Verdict::Wait {
            cause: WaitCause::LateEviction,
            ..
        }
    );
    match (&in_parts.0, &verdict) {
        (Verdict::Wait { .. } | Verdict::Never { .. }, Verdict::Run { .. }) => (verdict, whole),
        // Late bytes are there in a moment: what is loaded for that long would be too small for long.
        (Verdict::Run { moves }, _) if is_late && moves.iter().any(|m| matches!(m, Move::Load(..))) => {
            (verdict, whole)
        }
        _ => in_parts,
    }
}

fn verdict_on(ledger: &Ledger, need: &StageNeed, chosen: &Chosen, policy: Policy, now: Millis) -> Verdict {
    let ask = Ask::of_stage(ledger, need, chosen);
    Survey::of(ledger, &ask).verdict(&ask, policy, now)
}

/// The plan in which components that have parts get what the card has for them. Claimed components of the stage do not shrink in it
/// if `keep_claimed` says so.
fn decide_in_parts(
    ledger: &Ledger,
    need: &StageNeed,
    keep_claimed: bool,
    policy: Policy,
    now: Millis,
) -> (Verdict, Chosen) {
    let least = need.components.iter();
    let least: Chosen = least.map(|c| least_of(ledger, need, c, keep_claimed)).collect();
    let ask = Ask::of_stage(ledger, need, &least);
    let survey = Survey::of(ledger, &ask);
    let verdict = survey.verdict(&ask, policy, now);
    let Verdict::Run { moves } = &verdict else {
        return (verdict, least);
    };
    // In a single pass, more of a component on the card saves nothing: it takes what is free, and nothing of others.
    let evictable = if need.passes > 1 {
        survey.evictable()
    } else {
        let of_others = moves.iter().map(|m| freed_by(ledger, m)).sum::<Bytes>();
        of_others - ask.given_back
    };
    let mut spare = ledger.within_reach() + ask.given_back + evictable
        - (ledger.spoken_for() + ask.headroom + ask.at_driver + ask.scratch);
    spare = spare.min(ledger.capacity() - survey.pinned - ask.headroom - ask.peak);
    // Where memory is not remapped, bytes at the ends of holes serve no block.
    for _ in 0..if ledger.layout().is_some() {
        SMALLER_TRIES
    } else {
        1
    } {
        let chosen = largest_parts(ledger, need, &least, spare);
        if let run @ Verdict::Run { .. } = verdict_on(ledger, need, &chosen, policy, now) {
            return (run, chosen);
        }
        spare -= Bytes(spare.0 / 8);
    }
    (verdict, least)
}

/// How often parts are chosen for less memory, where they find no holes.
const SMALLER_TRIES: u32 = 8;

/// The largest parts of a stage's components that have at most `spare` bytes more than the least.
fn largest_parts(ledger: &Ledger, need: &StageNeed, least: &Chosen, mut spare: Bytes) -> Chosen {
    let mut chosen = least.clone();
    for (index, component) in need.components.iter().enumerate() {
        let is_first = |other: &Component| other.id == component.id;
        if let Some(first) = need.components[..index].iter().position(is_first) {
            chosen[index] = chosen[first];
            continue;
        }
        let most = component.bytes_of(least[index]) + spare;
        chosen[index] = best_part(ledger, component, least[index], most);
        spare -= component.bytes_of(chosen[index]) - component.bytes_of(least[index]);
    }
    chosen
}

/// A part grows only by at least this fraction of its component.
const WORTH_MOVING: u64 = 32;

/// The largest part of at most `most` bytes; or the part that is on the card, if that has hardly fewer: a few bytes more or less
/// from stage to stage must not move blocks.
fn best_part(ledger: &Ledger, component: &Component, least: Part, most: Bytes) -> Part {
    let best = component
        .largest_within(most)
        .map_or(least, |part| part.min(least));
    let Some(here) = ledger.resident(&component.id) else {
        return best;
    };
    let (has, would) = (here.bytes(), component.bytes_of(best));
    let is_settled = has <= most && would - has < Bytes(component.bytes.0 / WORTH_MOVING);
    if here.leases > 0 || is_settled {
        here.part
    } else {
        best
    }
}

/// All of a component, or the part that a running stage uses.
fn whole_of(ledger: &Ledger, component: &Component) -> Part {
    let leased = ledger.resident(&component.id).filter(|r| r.leases > 0);
    leased.map_or(Part::WHOLE, |r| r.part)
}

/// The smallest part of a component that a stage may be given: no smaller than what is in use, or claimed for others.
fn least_of(ledger: &Ledger, need: &StageNeed, component: &Component, keep_claimed: bool) -> Part {
    let least = component.least();
    let Some(here) = ledger.resident(&component.id) else {
        return least;
    };
    let stays = here.leases > 0
        || match ledger.claim_on(here, &need.model) {
            None => false,
            Some(Claim::OfOthers) if here.part == Part::WHOLE => true,
            Some(Claim::OfOthers | Claim::OfItsModel) => keep_claimed,
        };
    if stays { here.part.min(least) } else { least }
}

/// Bytes that a move gives back to the card.
pub fn freed_by(ledger: &Ledger, a_move: &Move) -> Bytes {
    let booked = |c: &Component| ledger.resident(&c.id).map_or(c.bytes, Resident::bytes);
    match a_move {
        Move::Evict(component) => booked(component),
        Move::Resize(component, part) => booked(component) - component.bytes_of(*part),
        Move::Load(..) | Move::Trim => Bytes::ZERO,
    }
}

/// The part of a component that is on the card after these moves; the whole of one that is not there.
pub fn part_after(ledger: &Ledger, moves: &[Move], component: &Component) -> Part {
    let moved = moves.iter().find_map(|m| match m {
        Move::Load(c, part) | Move::Resize(c, part) if c.id == component.id => Some(*part),
        Move::Load(..) | Move::Resize(..) | Move::Evict(_) | Move::Trim => None,
    });
    let here = ledger.resident(&component.id).map(|r| r.part);
    moved.or(here).unwrap_or(Part::WHOLE)
}

/// Predicted seconds of moves before a stage can run here. Infinite for [`Verdict::Never`]; for [`Verdict::Wait`],
/// the moves that follow the wait (the wait itself is not included).
pub fn predicted_move_seconds(ledger: &Ledger, need: &StageNeed, policy: Policy, now: Millis) -> f64 {
    match plan(ledger, need, policy, now) {
        Verdict::Run { moves } => moves.iter().map(|m| seconds_of(ledger, m)).sum(),
        Verdict::Wait { .. } => plan_low_memory(ledger, need, policy, now)
            .moves
            .iter()
            .map(|m| seconds_of(ledger, m))
            .sum(),
        Verdict::Never { .. } => f64::INFINITY,
    }
}

/// Moves for another program: evicts idle components until the driver shows `bytes` as free.
pub fn make_room(ledger: &Ledger, bytes: Bytes, now: Millis) -> Verdict {
    let ask = Ask {
        ids: Vec::new(),
        parts: Vec::new(),
        loads: Vec::new(),
        shrinks: Vec::new(),
        at_driver: bytes,
        given_back: Bytes::ZERO,
        scratch: Bytes::ZERO,
        peak: bytes,
        headroom: Bytes::ZERO,
        later: &[],
        model: &[],
    };
    Survey::of(ledger, &ask).verdict(&ask, Policy::Shared, now)
}

/// Whether the janitor trims the card: it has more slack than `slack_limit`, and no stage or move is under way.
pub fn should_trim(ledger: &Ledger, slack_limit: Bytes) -> bool {
    let is_moving = ledger.residents().any(|r| r.state != ResidentState::Resident);
    ledger.leases() == 0 && !is_moving && ledger.accounts().slack > slack_limit
}

/// Seconds to read some bytes of a component, by what all of it takes.
fn seconds_to_read(component: &Component, bytes: Bytes) -> f64 {
    component.reload_seconds.max(0.0) * bytes.0 as f64 / component.bytes.0.max(1) as f64
}

fn seconds_of(ledger: &Ledger, a_move: &Move) -> f64 {
    match a_move {
        Move::Load(component, part) => seconds_to_read(component, component.bytes_of(*part)),
        Move::Evict(component) => EVICT_SECONDS + component.bytes.0 as f64 * EVICT_SECONDS_PER_BYTE,
        Move::Resize(component, part) => {
            let here = ledger
                .resident(&component.id)
                .map_or(Bytes::ZERO, Resident::bytes);
            let then = component.bytes_of(*part);
            seconds_to_read(component, then - here)
                + EVICT_SECONDS
                + (here - then).0 as f64 * EVICT_SECONDS_PER_BYTE
        }
        Move::Trim => TRIM_SECONDS,
    }
}

/// The demand on the card, each component counted once.
struct Ask<'a> {
    /// All components of the stage, sorted by identity.
    ids: Vec<&'a ComponentId>,
    /// The components with the parts that they are to have, in the stage's order.
    parts: Vec<(&'a Component, Part)>,
    /// Loads, and parts that grow, in the stage's order.
    loads: Vec<Move>,
    /// Parts of its components that shrink.
    shrinks: Vec<Move>,
    /// Bytes that have to be free at the driver, not just in our pools: loads, or another program's memory.
    at_driver: Bytes,
    /// Bytes that its own components give back.
    given_back: Bytes,
    scratch: Bytes,
    peak: Bytes,
    /// Bytes to keep free beyond the card's own headroom.
    headroom: Bytes,
    /// Components that the job needs later.
    later: &'a [ComponentId],
    /// All components of the stage's model.
    model: &'a [ComponentId],
}

impl<'a> Ask<'a> {
    /// `chosen` has the part of each component of the stage.
    fn of_stage(ledger: &Ledger, need: &'a StageNeed, chosen: &Chosen) -> Ask<'a> {
        let mut by_id: Vec<(usize, &Component)> = need.components.iter().enumerate().collect();
        by_id.sort_by_key(|(position, component)| (&component.id, *position));
        by_id.dedup_by_key(|(_, component)| &component.id);
        let ids = by_id.iter().map(|(_, c)| &c.id).collect();
        by_id.sort_unstable_by_key(|(position, _)| *position);
        let mut ask = Ask {
            ids,
            parts: Vec::new(),
            loads: Vec::new(),
            shrinks: Vec::new(),
            at_driver: Bytes::ZERO,
            given_back: Bytes::ZERO,
            scratch: need.scratch,
            peak: need.scratch,
            headroom: need.headroom - ledger.headroom(),
            later: &need.later,
            model: &need.model,
        };
        for (position, component) in by_id {
            let part = chosen.get(position).copied().unwrap_or_default();
            let bytes = component.bytes_of(part);
            ask.peak += bytes;
            ask.parts.push((component, part));
            match ledger.resident(&component.id) {
                None => {
                    ask.at_driver += bytes;
                    ask.loads.push(Move::Load(component.clone(), part));
                }
                Some(here) if here.part == part => {}
                Some(here) => {
                    ask.at_driver += bytes - here.bytes();
                    ask.given_back += here.bytes() - bytes;
                    let grows = bytes > here.bytes();
                    let moves = if grows { &mut ask.loads } else { &mut ask.shrinks };
                    moves.push(Move::Resize(component.clone(), part));
                }
            }
        }
        ask
    }

    fn names(&self, resident: &Resident) -> bool {
        self.ids.binary_search(&&resident.component.id).is_ok()
    }
}

/// A component that can give up bytes for a stage.
#[derive(Clone, Copy)]
struct Source<'a> {
    resident: &'a Resident,
    /// The bytes that it keeps, because they are claimed; zero if it can be evicted.
    keeps: Bytes,
    /// Whether it is pinned or held.
    is_claimed: bool,
}

impl Source<'_> {
    /// The bytes that it can give up.
    fn bytes(&self) -> Bytes {
        self.resident.bytes() - self.keeps
    }
}

/// The supply, from one pass over the ledger: the components that can give up bytes, and the bytes that cannot be given up.
struct Survey<'a> {
    ledger: &'a Ledger,
    sources: Vec<Source<'a>>,
    /// Our own bytes that the stage does not need, and that are in use or held for others.
    busy: Bytes,
    /// Bytes that the stage does not need, and that are pinned for others.
    pinned: Bytes,
    /// Whether a component that the stage needs is being loaded or evicted.
    needed_is_moving: bool,
}

impl<'a> Survey<'a> {
    fn of(ledger: &'a Ledger, ask: &Ask<'_>) -> Survey<'a> {
        let mut survey = Survey {
            ledger,
            sources: Vec::new(),
            busy: Bytes::ZERO,
            pinned: Bytes::ZERO,
            needed_is_moving: false,
        };
        for resident in ledger.residents() {
            let is_still = resident.state == ResidentState::Resident;
            if ask.names(resident) {
                survey.needed_is_moving |= !is_still;
                continue;
            }
            let source = Source {
                resident,
                keeps: ledger.kept_for_others(resident, ask.model),
                is_claimed: resident.pinned || resident.held > 0,
            };
            let kept_for = if resident.pinned {
                &mut survey.pinned
            } else {
                &mut survey.busy
            };
            *kept_for += source.keeps;
            if is_still && resident.leases == 0 {
                survey.sources.push(source);
            } else {
                survey.busy += source.bytes();
            }
        }
        survey
    }

    fn verdict(&self, ask: &Ask<'_>, policy: Policy, now: Millis) -> Verdict {
        let capacity = self.ledger.capacity() - self.pinned - ask.headroom;
        if ask.peak > capacity {
            return Verdict::Never {
                needed: ask.peak,
                capacity,
            };
        }
        let holes = self.holes(ask, policy, now);
        if let Some(Holes::Never(NoHole { needed, largest })) = holes {
            return Verdict::Never {
                needed,
                capacity: largest,
            };
        }
        let short = self.missing(ask) - self.evictable();
        if short > Bytes::ZERO {
            return Verdict::Wait {
                short,
                cause: self.cause(short),
            };
        }
        if self.needed_is_moving {
            return Verdict::Wait {
                short,
                cause: WaitCause::Leases,
            };
        }
        match holes {
            Some(Holes::Made(moves)) => Verdict::Run { moves },
            Some(Holes::Missing { short, cause }) => Verdict::Wait { short, cause },
            Some(Holes::Never(_)) | None => Verdict::Run {
                moves: self.moves(ask, policy, now),
            },
        }
    }

    /// Bytes missing before any eviction. A demand of zero misses nothing, even on an overdrawn card.
    fn missing(&self, ask: &Ask<'_>) -> Bytes {
        let wanted = ask.at_driver + ask.scratch;
        if wanted == Bytes::ZERO {
            return Bytes::ZERO;
        }
        self.ledger.spoken_for() + ask.headroom + wanted - self.ledger.within_reach() - ask.given_back
    }

    /// Whether the policy evicts it in any case.
    fn must_go(&self, source: &Source<'_>, policy: Policy) -> bool {
        let is_large = source.resident.bytes() >= large_from(self.ledger.total());
        policy == Policy::Exclusive && is_large && !source.is_claimed
    }

    fn evictable(&self) -> Bytes {
        self.sources.iter().map(Source::bytes).sum()
    }

    /// The first claim whose release, together with those before it, would be enough.
    fn cause(&self, short: Bytes) -> WaitCause {
        let late = self.ledger.late();
        let ours = late + self.busy + self.ledger.booked_scratch();
        let reserved = ours + self.ledger.untaken();
        match short {
            short if short <= late => WaitCause::LateEviction,
            short if short <= ours => WaitCause::Leases,
            short if short <= reserved => WaitCause::Reservation,
            _ => WaitCause::Foreign,
        }
    }

    fn moves(&self, ask: &Ask<'_>, policy: Policy, now: Millis) -> Vec<Move> {
        let mut moves = self.victims(ask, policy, now);
        moves.extend(ask.shrinks.iter().cloned());
        let freed: Bytes = moves.iter().map(|m| freed_by(self.ledger, m)).sum();
        let accounts = self.ledger.accounts();
        let trim = match policy {
            Policy::Exclusive => !moves.is_empty() || !ask.loads.is_empty(),
            Policy::Shared => {
                let at_driver = ask.at_driver + ask.headroom + self.ledger.spoken_for();
                ask.at_driver > Bytes::ZERO && accounts.free + freed < at_driver
            }
        };
        if trim && accounts.slack > Bytes::ZERO {
            moves.push(Move::Trim);
        }
        moves.extend(ask.loads.iter().cloned());
        moves
    }

    /// Evictions: first those that the policy requires, then of the cheapest to reload until enough is free. Components that the
    /// job itself needs later come last, and claimed ones after them. Evictions that later choices made unnecessary are left out,
    /// and a component that has parts gives up only what is missing.
    fn victims(&self, ask: &Ask<'_>, policy: Policy, now: Millis) -> Vec<Move> {
        let missing = self.missing(ask);
        let (victims, others): (Vec<Source<'_>>, Vec<Source<'_>>) =
            self.sources.iter().partition(|s| self.must_go(s, policy));
        let freed: Bytes = victims.iter().map(Source::bytes).sum();
        let mut victims: Vec<Move> = victims
            .into_iter()
            .map(|s| Move::Evict(s.resident.component.clone()))
            .collect();
        let missing = missing - freed;
        if missing == Bytes::ZERO {
            return victims;
        }
        let mut by_cost = cheapest_first(others, ask, now);
        let mut sum = Bytes::ZERO;
        let enough = by_cost.iter().position(|s| {
            sum += s.bytes();
            sum >= missing
        });
        by_cost.truncate(enough.map_or(by_cost.len(), |last| last + 1));
        let mut spare = sum - missing;
        let mut chosen: Vec<Move> = Vec::with_capacity(by_cost.len());
        for source in by_cost.into_iter().rev() {
            let component = &source.resident.component;
            if source.bytes() <= spare {
                spare -= source.bytes();
            } else if let Some(part) = component.largest_within(source.keeps + spare) {
                spare -= component.bytes_of(part) - source.keeps;
                chosen.push(Move::Resize(component.clone(), part));
            } else {
                chosen.push(Move::Evict(component.clone()));
            }
        }
        victims.extend(chosen.into_iter().rev());
        victims
    }
}

/// Components that can give up bytes: the cheapest to reload first, those that the job needs later last, and claimed ones after
/// them.
fn cheapest_first<'a>(sources: Vec<Source<'a>>, ask: &Ask<'_>, now: Millis) -> Vec<Source<'a>> {
    let is_later = |s: &Source<'_>| ask.later.contains(&s.resident.component.id);
    let sources = sources.into_iter().filter(|s| s.bytes() > Bytes::ZERO);
    let mut keyed: Vec<(f64, Source<'_>)> = sources.map(|s| (s.resident.cost_per_byte(now), s)).collect();
    keyed.sort_by(|(a, r), (b, s)| {
        let last = (r.is_claimed, is_later(r)).cmp(&(s.is_claimed, is_later(s)));
        let (here, there) = (r.resident.last_used, s.resident.last_used);
        last.then(a.total_cmp(b)).then(here.cmp(&there))
    });
    keyed.into_iter().map(|(_, s)| s).collect()
}
