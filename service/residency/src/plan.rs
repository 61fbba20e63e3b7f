//! The planner: which moves make room for a stage, or why it has to wait, or that it can never run on this card.
//!
//! One pass over the ledger and one sort of the eviction candidates, no nested loops: a thousand components cost well
//! under a millisecond.

use serde::{Deserialize, Serialize};

use crate::ledger::Ledger;
use crate::nouns::{Bytes, Component, ComponentId, Millis, StageNeed};
use crate::resident::{Resident, ResidentState};

/// Measured: 40 ms until the driver shows 21.5 GB as free on an H100; a few milliseconds at least.
const EVICT_SECONDS: f64 = 0.005;
const EVICT_SECONDS_PER_BYTE: f64 = 0.040 / 21.5e9;
const TRIM_SECONDS: f64 = 0.005;

/// One change to the card's memory. Moves are carried out in order, each bracketed by ledger entries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Move {
    Evict(Component),
    Load(Component),
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

/// The planner's decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The stage can run after these moves; at once if there are none.
    Run {
        /// Evictions, then a trim if one is needed, then loads.
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
pub fn plan(ledger: &Ledger, need: &StageNeed, policy: Policy, now: Millis) -> Verdict {
    let ask = Ask::of_stage(ledger, need);
    let survey = Survey::of(ledger, &ask);
    survey.verdict(&ask, policy, now)
}

/// A plan that never refuses: it frees as much as is evictable and reports the shortage.
pub fn plan_low_memory(ledger: &Ledger, need: &StageNeed, policy: Policy, now: Millis) -> LowMemory {
    let ask = Ask::of_stage(ledger, need);
    let survey = Survey::of(ledger, &ask);
    let short = survey.missing(&ask) - survey.evictable();
    LowMemory {
        moves: survey.moves(&ask, policy, now),
        short,
    }
}

/// Predicted seconds of moves before a stage can run here. Infinite for [`Verdict::Never`]; for [`Verdict::Wait`],
/// the moves that follow the wait (the wait itself is not included).
pub fn predicted_move_seconds(ledger: &Ledger, need: &StageNeed, policy: Policy, now: Millis) -> f64 {
    match plan(ledger, need, policy, now) {
        Verdict::Run { moves } => moves.iter().map(seconds_of).sum(),
        Verdict::Wait { .. } => plan_low_memory(ledger, need, policy, now)
            .moves
            .iter()
            .map(seconds_of)
            .sum(),
        Verdict::Never { .. } => f64::INFINITY,
    }
}

/// Moves for another program: evicts idle components until the driver shows `bytes` as free.
pub fn make_room(ledger: &Ledger, bytes: Bytes, now: Millis) -> Verdict {
    let ask = Ask {
        ids: Vec::new(),
        loads: Vec::new(),
        at_driver: bytes,
        scratch: Bytes::ZERO,
        peak: bytes,
        headroom: Bytes::ZERO,
        later: &[],
    };
    Survey::of(ledger, &ask).verdict(&ask, Policy::Shared, now)
}

/// Whether the janitor trims the card: it has more slack than `slack_limit`, and no stage or move is under way.
pub fn should_trim(ledger: &Ledger, slack_limit: Bytes) -> bool {
    let is_moving = ledger.residents().any(|r| r.state != ResidentState::Resident);
    ledger.leases() == 0 && !is_moving && ledger.accounts().slack > slack_limit
}

fn seconds_of(a_move: &Move) -> f64 {
    match a_move {
        Move::Load(component) => component.reload_seconds.max(0.0),
        Move::Evict(component) => EVICT_SECONDS + component.bytes.0 as f64 * EVICT_SECONDS_PER_BYTE,
        Move::Trim => TRIM_SECONDS,
    }
}

/// The demand on the card, each component counted once.
struct Ask<'a> {
    /// All components of the stage, sorted by identity.
    ids: Vec<&'a ComponentId>,
    /// Components that are not booked yet, in the stage's order.
    loads: Vec<&'a Component>,
    /// Bytes that have to be free at the driver, not just in our pools: loads, or another program's memory.
    at_driver: Bytes,
    scratch: Bytes,
    peak: Bytes,
    /// Bytes to keep free beyond the card's own headroom.
    headroom: Bytes,
    /// Components that the job needs later.
    later: &'a [ComponentId],
}

impl<'a> Ask<'a> {
    fn of_stage(ledger: &Ledger, need: &'a StageNeed) -> Ask<'a> {
        let mut by_id: Vec<(usize, &Component)> = need.components.iter().enumerate().collect();
        by_id.sort_by_key(|(position, component)| (&component.id, *position));
        by_id.dedup_by_key(|(_, component)| &component.id);
        let ids = by_id.iter().map(|(_, c)| &c.id).collect();
        let peak = by_id.iter().map(|(_, c)| c.bytes).sum::<Bytes>() + need.scratch;
        by_id.retain(|(_, c)| ledger.resident(&c.id).is_none());
        by_id.sort_unstable_by_key(|(position, _)| *position);
        let loads: Vec<&Component> = by_id.into_iter().map(|(_, c)| c).collect();
        let at_driver = loads.iter().map(|c| c.bytes).sum();
        Ask {
            ids,
            loads,
            at_driver,
            scratch: need.scratch,
            peak,
            headroom: need.headroom - ledger.headroom(),
            later: &need.later,
        }
    }

    fn names(&self, resident: &Resident) -> bool {
        self.ids.binary_search(&&resident.component.id).is_ok()
    }
}

/// The supply, from one pass over the ledger: the components that can be evicted, and the bytes that cannot.
struct Survey<'a> {
    ledger: &'a Ledger,
    idle: Vec<&'a Resident>,
    /// Our own bytes that the stage does not need and that are neither idle nor pinned.
    busy: Bytes,
    /// Pinned bytes that the stage does not need.
    pinned: Bytes,
    /// Whether a component that the stage needs is being loaded or evicted.
    needed_is_moving: bool,
}

impl<'a> Survey<'a> {
    fn of(ledger: &'a Ledger, ask: &Ask<'_>) -> Survey<'a> {
        let (mut idle, mut busy, mut pinned) = (Vec::new(), Bytes::ZERO, Bytes::ZERO);
        let mut needed_is_moving = false;
        for resident in ledger.residents() {
            if ask.names(resident) {
                needed_is_moving |= resident.state != ResidentState::Resident;
            } else if resident.is_idle() {
                idle.push(resident);
            } else if resident.pinned {
                pinned += resident.component.bytes;
            } else {
                busy += resident.component.bytes;
            }
        }
        Survey {
            ledger,
            idle,
            busy,
            pinned,
            needed_is_moving,
        }
    }

    fn verdict(&self, ask: &Ask<'_>, policy: Policy, now: Millis) -> Verdict {
        let capacity = self.ledger.capacity() - self.pinned - ask.headroom;
        if ask.peak > capacity {
            return Verdict::Never {
                needed: ask.peak,
                capacity,
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
        Verdict::Run {
            moves: self.moves(ask, policy, now),
        }
    }

    /// Bytes missing before any eviction. A demand of zero misses nothing, even on an overdrawn card.
    fn missing(&self, ask: &Ask<'_>) -> Bytes {
        let wanted = ask.at_driver + ask.scratch;
        if wanted == Bytes::ZERO {
            return Bytes::ZERO;
        }
        self.ledger.spoken_for() + ask.headroom + wanted - self.ledger.within_reach()
    }

    fn evictable(&self) -> Bytes {
        self.idle.iter().map(|r| r.component.bytes).sum()
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
        let victims = self.victims(ask, policy, now);
        let freed: Bytes = victims.iter().map(|r| r.component.bytes).sum();
        let accounts = self.ledger.accounts();
        let trim = match policy {
            Policy::Exclusive => !victims.is_empty() || !ask.loads.is_empty(),
            Policy::Shared => {
                let at_driver = ask.at_driver + ask.headroom + self.ledger.spoken_for();
                ask.at_driver > Bytes::ZERO && accounts.free + freed < at_driver
            }
        };
        let mut moves = Vec::with_capacity(victims.len() + 1 + ask.loads.len());
        moves.extend(victims.into_iter().map(|r| Move::Evict(r.component.clone())));
        if trim && accounts.slack > Bytes::ZERO {
            moves.push(Move::Trim);
        }
        moves.extend(ask.loads.iter().map(|&c| Move::Load(c.clone())));
        moves
    }

    /// Components to evict: first those that the policy requires, then the cheapest to reload until enough is free. Components
    /// that the job itself needs later come last. Evictions that later choices made unnecessary are left out.
    fn victims(&self, ask: &Ask<'_>, policy: Policy, now: Millis) -> Vec<&'a Resident> {
        let missing = self.missing(ask);
        let large = large_from(self.ledger.total());
        let must_go = |r: &Resident| policy == Policy::Exclusive && r.component.bytes >= large;
        let (mut victims, others): (Vec<&Resident>, Vec<&Resident>) =
            self.idle.iter().partition(|r| must_go(r));
        let freed: Bytes = victims.iter().map(|r| r.component.bytes).sum();
        let missing = missing - freed;
        if missing == Bytes::ZERO {
            return victims;
        }
        let is_later = |r: &Resident| ask.later.contains(&r.component.id);
        let mut by_cost: Vec<(f64, &Resident)> =
            others.into_iter().map(|r| (r.cost_per_byte(now), r)).collect();
        by_cost.sort_by(|(a, r), (b, s)| {
            let later = is_later(r).cmp(&is_later(s));
            later.then(a.total_cmp(b)).then(r.last_used.cmp(&s.last_used))
        });
        let mut sum = Bytes::ZERO;
        let enough = by_cost.iter().position(|(_, r)| {
            sum += r.component.bytes;
            sum >= missing
        });
        by_cost.truncate(enough.map_or(by_cost.len(), |last| last + 1));
        let mut spare = sum - missing;
        let mut chosen: Vec<&Resident> = Vec::with_capacity(by_cost.len());
        for (_, resident) in by_cost.into_iter().rev() {
            let bytes = resident.component.bytes;
            if bytes <= spare {
                spare -= bytes;
            } else {
                chosen.push(resident);
            }
        }
        victims.extend(chosen.into_iter().rev());
        victims
    }
}
