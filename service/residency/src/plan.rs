//! The planner: which moves make room for a stage, or why it has to wait, or that it can never run here.
//!
//! One pass over the ledger, one sort of what could leave, no loops within loops: a thousand components cost well
//! under a millisecond.

use serde::{Deserialize, Serialize};

use crate::ledger::Ledger;
use crate::nouns::{Bytes, Component, ComponentId, Millis, StageNeed};
use crate::resident::{Resident, ResidentState};

/// One thing to do to the card's memory. Moves are carried out in order, each bracketed by ledger entries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Move {
    /// Free a component.
    Evict(Component),
    /// Bring a component.
    Load(Component),
    /// Hand slack back to the driver, so that component pools can have it.
    Trim,
}

/// How much of what a stage does not need may stay while it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Evict only what the stage's peak needs.
    #[default]
    Shared,
    /// One large component at a time: every large component (see [`large_from`]) that the stage does not need leaves,
    /// and slack is trimmed, before anything is loaded.
    Exclusive,
}

/// What a stage that could run one day is waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitCause {
    /// Bytes that we freed and the driver does not show yet.
    LateEviction,
    /// Components and scratch of ours that are busy, held by a client, or on their way.
    Leases,
    /// Memory that others hold.
    Foreign,
    /// Memory that is booked for another program.
    Reservation,
}

/// The planner's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// These moves, in this order, and the stage can run. No moves: it can run at once.
    Run {
        /// Evictions, then a trim if one is needed, then loads.
        moves: Vec<Move>,
    },
    /// It does not fit now, and would if somebody gave memory back.
    Wait {
        /// Bytes missing after everything idle has left. Zero where a component it needs is on its way.
        short: Bytes,
        /// Who would have to give them back.
        cause: WaitCause,
    },
    /// It does not fit on this card, whoever leaves.
    Never {
        /// The stage's peak.
        needed: Bytes,
        /// The card less context, workspaces, headroom, unexplained bytes, and pins that the stage does not need.
        capacity: Bytes,
    },
}

/// A plan for a request that allows low memory: it runs although it may be short.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LowMemory {
    /// The moves that free as much as is needed, or as can be freed.
    pub moves: Vec<Move>,
    /// What will be missing at the stage's peak if every prediction is right. Zero: an ordinary plan.
    pub short: Bytes,
}

/// When the janitor acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdlePolicy {
    /// Slack above this is handed back to the driver.
    pub slack_limit: Bytes,
    /// Components that nobody has used for this long leave; `None` keeps them until their memory is wanted. A keep-alive
    /// of a component's own goes before this.
    pub unload_all_after_ms: Option<u64>,
}

impl Default for IdlePolicy {
    fn default() -> IdlePolicy {
        IdlePolicy {
            slack_limit: Bytes::mib(512),
            unload_all_after_ms: None,
        }
    }
}

/// From this size on a component is *large* on a card of `total` bytes: 1 GiB, or a sixteenth of a small card.
pub fn large_from(total: Bytes) -> Bytes {
    Bytes::gib(1).min(Bytes(total.0 / 16))
}

/// Can this stage run on this card, and what has to be moved first?
pub fn plan(ledger: &Ledger, need: &StageNeed, policy: Policy, now: Millis) -> Verdict {
    let ask = Ask::of_stage(ledger, need);
    let survey = Survey::of(ledger, &ask);
    survey.verdict(&ask, policy, now)
}

/// A plan that does not refuse: it frees what can be freed and says what will be missing.
pub fn plan_low_memory(ledger: &Ledger, need: &StageNeed, policy: Policy, now: Millis) -> LowMemory {
    let ask = Ask::of_stage(ledger, need);
    let survey = Survey::of(ledger, &ask);
    let short = survey.missing(&ask) - survey.evictable();
    LowMemory {
        moves: survey.moves(&ask, policy, now),
        short,
    }
}

/// Room for another program: idle components leave until `bytes` are free at the driver.
pub fn make_room(ledger: &Ledger, bytes: Bytes, now: Millis) -> Verdict {
    let ask = Ask {
        ids: Vec::new(),
        loads: Vec::new(),
        at_driver: bytes,
        scratch: Bytes::ZERO,
        peak: bytes,
    };
    Survey::of(ledger, &ask).verdict(&ask, Policy::Shared, now)
}

/// What the janitor does while nothing runs: components whose time is over leave, and slack goes back to the driver.
pub fn idle_moves(ledger: &Ledger, now: Millis, policy: IdlePolicy) -> Vec<Move> {
    let moving = ledger.residents().any(|r| r.state != ResidentState::Resident);
    if ledger.leases() > 0 || moving {
        return Vec::new();
    }
    let is_over = |r: &Resident| match (r.keep_alive, policy.unload_all_after_ms) {
        (Some(until), _) => until <= now,
        (None, Some(after)) => now.since(r.last_used) >= after,
        (None, None) => false,
    };
    let over = ledger.residents().filter(|r| r.is_idle() && is_over(r));
    let mut moves: Vec<Move> = over.map(|r| Move::Evict(r.component.clone())).collect();
    if ledger.accounts().slack > policy.slack_limit {
        moves.push(Move::Trim);
    }
    moves
}

/// What is asked of the card, each component counted once.
struct Ask<'a> {
    /// All components of the stage, sorted.
    ids: Vec<&'a ComponentId>,
    /// Those that have nothing booked yet, in the stage's order.
    loads: Vec<&'a Component>,
    /// Bytes that have to be free at the driver, not just in our pools: loads, or another program's.
    at_driver: Bytes,
    scratch: Bytes,
    peak: Bytes,
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
        }
    }

    fn names(&self, resident: &Resident) -> bool {
        self.ids.binary_search(&&resident.component.id).is_ok()
    }
}

/// One pass over the ledger: what could leave, and what cannot.
struct Survey<'a> {
    ledger: &'a Ledger,
    idle: Vec<&'a Resident>,
    /// Ours, not needed by the stage, and neither idle nor pinned.
    busy: Bytes,
    /// Pinned and not needed by the stage.
    pinned: Bytes,
    /// Whether something that the stage needs is being loaded or evicted right now.
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
        let capacity = self.ledger.capacity() - self.pinned;
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

    /// Bytes that are missing before anything leaves. Who takes nothing misses nothing, however overdrawn the card is.
    fn missing(&self, ask: &Ask<'_>) -> Bytes {
        let wanted = ask.at_driver + ask.scratch;
        if wanted == Bytes::ZERO {
            return Bytes::ZERO;
        }
        self.ledger.spoken_for() + wanted - self.ledger.within_reach()
    }

    fn evictable(&self) -> Bytes {
        self.idle.iter().map(|r| r.component.bytes).sum()
    }

    /// The first of these whose return would be enough, together with those before it.
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
        let victims = self.victims(self.missing(ask), policy, now);
        let freed: Bytes = victims.iter().map(|r| r.component.bytes).sum();
        let accounts = self.ledger.accounts();
        let trim = match policy {
            Policy::Exclusive => !victims.is_empty() || !ask.loads.is_empty(),
            Policy::Shared => {
                let at_driver = ask.at_driver + self.ledger.spoken_for();
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

    /// Who leaves: what the policy wants gone, then the cheapest to bring back until enough is free, less whoever
    /// turned out not to be necessary after all.
    fn victims(&self, missing: Bytes, policy: Policy, now: Millis) -> Vec<&'a Resident> {
        let large = large_from(self.ledger.total());
        let must_go = |r: &Resident| policy == Policy::Exclusive && r.component.bytes >= large;
        let (mut victims, others): (Vec<&Resident>, Vec<&Resident>) =
            self.idle.iter().partition(|r| must_go(r));
        let freed: Bytes = victims.iter().map(|r| r.component.bytes).sum();
        let missing = missing - freed;
        if missing == Bytes::ZERO {
            return victims;
        }
        let mut by_cost: Vec<(f64, &Resident)> =
            others.into_iter().map(|r| (r.cost_per_byte(now), r)).collect();
        by_cost.sort_by(|(a, r), (b, s)| a.total_cmp(b).then(r.last_used.cmp(&s.last_used)));
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
