//! Plans for cards that do not remap memory: each allocation of a stage gets a hole that is large enough for it.
//!
//! The plan by bytes comes first, and is carried out on a copy of the card's [`Layout`]. If an allocation finds no hole there, the
//! cheapest window over the addresses is cleared: holes and evictable ranges side by side. What turns out not to be needed stays.

use std::collections::{BTreeMap, HashSet};

use super::{
    Ask, LowMemory, Move, Policy, Source, Survey, WaitCause, cheapest_first, freed_by, seconds_of,
    seconds_to_read,
};
use crate::layout::{Layout, NoHole, Owner, Range};
use crate::ledger::Claim;
use crate::nouns::{Bytes, Component, ComponentId, Millis};
use crate::parts::Part;
use crate::resident::{Resident, ResidentState};

/// How often windows are cleared one after the other, before all that may leave does.
const WINDOWS_AT_MOST: usize = 16;

/// How often it is tried whether a victim could stay, so that a plan over a thousand components takes milliseconds.
const SPARED_AT_MOST: u32 = 32;

/// Whether a stage's allocations find holes.
pub(super) enum Holes {
    /// After these moves they do.
    Made(Vec<Move>),
    /// They would if claimed memory were released. The largest hole that there can be is `short` bytes too small.
    Missing { short: Bytes, cause: WaitCause },
    /// Pins alone, or the size of the card, leave no hole that is large enough.
    Never(NoHole),
}

/// A component that leaves the card, whole or but for a part.
#[derive(Clone, Copy)]
struct Victim<'a> {
    resident: &'a Resident,
    /// What stays of it.
    keeps: Option<Part>,
    /// Predicted cost of its absence, in nanoseconds: whole numbers add up in any order.
    cost: u64,
    /// Whether the policy evicts it in any case.
    must_go: bool,
}

/// Moves that came to an allocation without a hole.
struct Stuck {
    /// The card before that allocation.
    layout: Layout,
    no_hole: NoHole,
}

impl<'a> Survey<'a> {
    /// Whether and how a stage's allocations find holes; `None` on a card that remaps memory.
    pub(super) fn holes(&self, ask: &Ask<'_>, policy: Policy, now: Millis) -> Option<Holes> {
        let layout = self.ledger.layout()?;
        let has_bytes = self.missing(ask) <= self.evictable() && !self.needed_is_moving;
        let mut short = Bytes::ZERO;
        if has_bytes {
            match self.join(layout, ask, policy, now) {
                Ok(moves) => return Some(Holes::Made(moves)),
                Err(no_hole) => short = no_hole.short(),
            }
        }
        let pinned = |id: &ComponentId| {
            let resident = self.ledger.resident(id);
            resident.is_some_and(|r| r.pinned && self.is_of_others(r, ask))
        };
        let never = self.without(layout, ask, |owner| match owner {
            Owner::Fixed => false,
            Owner::Component { id, .. } => !pinned(id),
            Owner::Foreign | Owner::Late | Owner::Scratch | Owner::Slack => true,
        });
        if let Err(no_hole) = never {
            return Some(Holes::Never(no_hole));
        }
        Some(Holes::Missing {
            short,
            cause: self.cause_of_missing(layout, ask),
        })
    }

    /// As [`super::plan_low_memory`]: everything that may leave leaves, if that is not enough.
    pub(super) fn low_memory_with_holes(
        &self,
        ask: &Ask<'_>,
        policy: Policy,
        now: Millis,
        holes: Holes,
    ) -> LowMemory {
        let short = self.missing(ask) - self.evictable();
        let missing = match holes {
            Holes::Made(moves) => return LowMemory { moves, short },
            Holes::Missing { short, .. } => short,
            Holes::Never(no_hole) => no_hole.short(),
        };
        let others = self.sources.iter().filter(|s| s.bytes() > Bytes::ZERO);
        let others = others.map(|s| self.victim(s, ask, policy, now));
        LowMemory {
            moves: self.clearing(&others.collect::<Vec<_>>(), ask),
            short: if short > Bytes::ZERO { short } else { missing },
        }
    }

    /// The cheapest moves found after which each allocation finds a hole.
    fn join(&self, layout: &Layout, ask: &Ask<'_>, policy: Policy, now: Millis) -> Result<Vec<Move>, NoHole> {
        let by_bytes = self.moves(ask, policy, now);
        let mut no_hole = match carry_out(layout, &by_bytes, ask.scratch) {
            Ok(()) => return Ok(by_bytes),
            Err(stuck) => stuck.no_hole,
        };
        let all = self.candidates(ask, policy, now);
        let mut gone: BTreeMap<&ComponentId, Victim<'a>> = BTreeMap::new();
        gone.extend(all.iter().filter(|(_, v)| v.must_go));
        let mut cleared = layout.clone();
        cleared.free(|range| range.owner == Owner::Slack || is_of(range, &gone));
        let mut window = cheapest_window(&cleared, self.largest_allocation(ask), &all);
        // Where no window is large enough, what the stage's own components give back may join with all others that leave; and if it
        // does not, its own are loaded elsewhere. So for components that nobody claims, then for those of the stage's model, and at last
        // claimed components give up what they may.
        let only = |may: &dyn Fn(&Victim<'a>) -> bool| {
            let mut some = all.clone();
            some.retain(|_, v| may(v));
            some
        };
        let mut everything = all.clone();
        let claimed = self
            .sources
            .iter()
            .filter(|s| s.keeps > Bytes::ZERO && s.bytes() > Bytes::ZERO);
        everything.extend(claimed.map(|s| (&s.resident.component.id, self.victim(s, ask, policy, now))));
        let is_own = |v: &Victim<'_>| ask.names(v.resident);
        let resorts = [
            only(&|v| v.resident.is_idle() && !is_own(v)),
            only(&|v| v.resident.is_idle()),
            only(&|v| !is_own(v)),
            all.clone(),
            everything,
        ];
        let all_resorts = resorts.len();
        let mut last_resorts = resorts.into_iter();
        for cleared in 1.. {
            if let Some(window) = window {
                gone.extend(window.into_iter().filter_map(|id| Some((id, *all.get(id)?))));
                self.add_until_enough(&mut gone, &all, ask, now);
            } else if let Some(resort) = last_resorts.next() {
                gone = resort;
            } else {
                return Err(no_hole);
            }
            let victims: Vec<Victim<'a>> = gone.values().copied().collect();
            let is_enough = self.missing(ask) <= self.freed_by_all(&victims, ask);
            let stuck = match carry_out(layout, &self.clearing(&victims, ask), ask.scratch) {
                Ok(()) if is_enough => break,
                Ok(()) => {
                    window = None;
                    continue;
                }
                Err(stuck) => stuck,
            };
            no_hole = stuck.no_hole;
            let mut left = all.clone();
            left.retain(|id, _| !gone.contains_key(id));
            let next = cheapest_window(&stuck.layout, no_hole.needed, &left);
            window = next.filter(|window| {
                !window.is_empty() && last_resorts.len() == all_resorts && cleared < WINDOWS_AT_MOST
            });
        }
        Ok(self.clearing(&self.spared(layout, gone.into_values().collect(), ask), ask))
    }

    /// All that a plan may evict, with what that costs. A component that the stage itself needs is reloaded at once, in another place.
    fn candidates(
        &self,
        ask: &Ask<'_>,
        policy: Policy,
        now: Millis,
    ) -> BTreeMap<&'a ComponentId, Victim<'a>> {
        let own = self.ledger.residents();
        let own = own.filter(|r| ask.names(r) && self.may_leave(r, ask));
        let own = own.map(|resident| Source {
            resident,
            keeps: Bytes::ZERO,
            is_claimed: resident.pinned || resident.held > 0,
        });
        let all = self.evictable_whole().chain(own);
        all.map(|s| (&s.resident.component.id, self.victim(&s, ask, policy, now)))
            .collect()
    }

    /// The components that can leave the card.
    fn evictable_whole(&self) -> impl Iterator<Item = Source<'a>> {
        self.sources.iter().copied().filter(|s| s.keeps == Bytes::ZERO)
    }

    /// Whether a component is pinned or held for another model.
    fn is_of_others(&self, resident: &Resident, ask: &Ask<'_>) -> bool {
        self.ledger.claim_on(resident, ask.model) == Some(Claim::OfOthers)
    }

    /// Whether a component could leave the card now.
    fn may_leave(&self, resident: &Resident, ask: &Ask<'_>) -> bool {
        let is_still = resident.state == ResidentState::Resident && resident.leases == 0;
        is_still && !self.is_of_others(resident, ask)
    }

    fn victim(&self, source: &Source<'a>, ask: &Ask<'_>, policy: Policy, now: Millis) -> Victim<'a> {
        let resident = source.resident;
        let is_own = ask.names(resident);
        let certain = is_own || ask.later.contains(&resident.component.id);
        let chance = if certain { 1.0 } else { resident.chance_of_use(now) };
        let seconds = seconds_to_read(&resident.component, resident.bytes()) * chance
            + seconds_of(self.ledger, &Move::Evict(resident.component.clone()));
        Victim {
            resident,
            keeps: (source.keeps > Bytes::ZERO).then(|| resident.component.least()),
            cost: (seconds * 1e9) as u64,
            must_go: !is_own && self.must_go(source, policy),
        }
    }

    /// Adds the cheapest other components until the bytes are enough.
    fn add_until_enough<'v>(
        &self,
        gone: &mut BTreeMap<&'v ComponentId, Victim<'a>>,
        all: &BTreeMap<&'v ComponentId, Victim<'a>>,
        ask: &Ask<'_>,
        now: Millis,
    ) {
        let victims: Vec<Victim<'a>> = gone.values().copied().collect();
        let mut missing = self.missing(ask) - self.freed_by_all(&victims, ask);
        let left = self.evictable_whole();
        let left = left.filter(|s| !gone.contains_key(&s.resident.component.id));
        for source in cheapest_first(left.collect(), ask, now) {
            if missing == Bytes::ZERO {
                break;
            }
            missing -= source.bytes();
            gone.extend(
                all.get_key_value(&source.resident.component.id)
                    .map(|(id, v)| (*id, *v)),
            );
        }
    }

    /// Those of the victims that have to go: without each of the others, the most expensive first, all allocations find holes.
    /// One that has parts gives up only as much as it must.
    fn spared(&self, layout: &Layout, mut victims: Vec<Victim<'a>>, ask: &Ask<'_>) -> Vec<Victim<'a>> {
        let mut left = SPARED_AT_MOST;
        let mut suffice = |victims: &[Victim<'a>]| {
            left = left.saturating_sub(1);
            left > 0
                && self.missing(ask) <= self.freed_by_all(victims, ask)
                && carry_out(layout, &self.clearing(victims, ask), ask.scratch).is_ok()
        };
        victims.sort_by_key(|v| (v.must_go, std::cmp::Reverse(v.cost)));
        let mut at = 0;
        while at < victims.len() && !victims[at].must_go {
            let victim = victims.remove(at);
            if !suffice(&victims) {
                victims.insert(at, victim);
                at += 1;
            }
        }
        for at in 0..victims.len() {
            let resident = victims[at].resident;
            if victims[at].must_go || ask.names(resident) {
                continue;
            }
            let (mut from, mut to) = (resident.part.0 + 1, resident.component.least().0 + 1);
            while from < to {
                let middle = u32::midpoint(from, to);
                let before = victims[at].keeps.replace(Part(middle));
                if suffice(&victims) {
                    to = middle;
                } else {
                    victims[at].keeps = before;
                    from = middle + 1;
                }
            }
        }
        victims
    }

    /// Bytes that victims give to the stage. What the stage itself needs comes back.
    fn freed_by_all(&self, victims: &[Victim<'a>], ask: &Ask<'_>) -> Bytes {
        let others = victims.iter().filter(|v| !ask.names(v.resident));
        others.map(|v| freed_by(self.ledger, &v.leaves())).sum()
    }

    /// Moves that make victims leave, give slack back, and load what the stage needs, in its order.
    fn clearing(&self, victims: &[Victim<'a>], ask: &Ask<'_>) -> Vec<Move> {
        let (shrinks, evictions): (Vec<Move>, Vec<Move>) = victims
            .iter()
            .map(Victim::leaves)
            .partition(|m| matches!(m, Move::Resize(..)));
        let mut moves = evictions;
        moves.extend(shrinks);
        let leaves = |component: &Component| victims.iter().any(|v| v.resident.component.id == component.id);
        let stays = |m: &&Move| !matches!(m, Move::Resize(component, _) if leaves(component));
        moves.extend(ask.shrinks.iter().filter(stays).cloned());
        if self.ledger.accounts().slack > Bytes::ZERO {
            moves.push(Move::Trim);
        }
        let mut loads = ask.loads.iter().filter(stays).peekable();
        for (component, part) in &ask.parts {
            let is_next =
                |m: &&Move| matches!(m, Move::Load(c, _) | Move::Resize(c, _) if c.id == component.id);
            if let Some(load) = loads.next_if(is_next) {
                moves.push(load.clone());
            } else if leaves(component) {
                moves.push(Move::Load((*component).clone(), *part));
            }
        }
        moves
    }

    /// The largest allocation that the stage's components or its activations need.
    fn largest_allocation(&self, ask: &Ask<'_>) -> Bytes {
        let all = ask
            .parts
            .iter()
            .flat_map(|(component, part)| component.allocations_of(*part));
        let largest = all.map(|(_, bytes)| bytes).max();
        largest.unwrap_or(Bytes::ZERO).max(ask.scratch)
    }

    /// The first claim whose release, together with those before it, would make the holes.
    fn cause_of_missing(&self, layout: &Layout, ask: &Ask<'_>) -> WaitCause {
        let resident = |id: &ComponentId| self.ledger.resident(id);
        let is_late = |owner: &Owner| match owner {
            Owner::Late | Owner::Slack => true,
            Owner::Component { id, .. } => resident(id).is_none_or(|r| self.may_leave(r, ask)),
            Owner::Fixed | Owner::Foreign | Owner::Scratch => false,
        };
        if self.without(layout, ask, is_late).is_ok() {
            return WaitCause::LateEviction;
        }
        let is_ours = |owner: &Owner| match owner {
            Owner::Late | Owner::Slack | Owner::Scratch => true,
            Owner::Component { id, .. } => {
                resident(id).is_none_or(|r| !r.pinned || !self.is_of_others(r, ask))
            }
            Owner::Fixed | Owner::Foreign => false,
        };
        if self.without(layout, ask, is_ours).is_ok() {
            return WaitCause::Leases;
        }
        WaitCause::Foreign
    }

    /// Whether all that the stage needs finds holes on a card without some of the ranges.
    fn without(
        &self,
        layout: &Layout,
        ask: &Ask<'_>,
        is_gone: impl Fn(&Owner) -> bool,
    ) -> Result<(), NoHole> {
        let mut bare = layout.clone();
        bare.free(|range| is_gone(&range.owner));
        for (component, part) in &ask.parts {
            bare.hold(component, *part)?;
        }
        bare.take_scratch(ask.scratch).map(|_| ())
    }
}

impl Victim<'_> {
    fn leaves(&self) -> Move {
        let component = self.resident.component.clone();
        match self.keeps {
            Some(part) => Move::Resize(component, part),
            None => Move::Evict(component),
        }
    }
}

fn is_of(range: &Range, victims: &BTreeMap<&ComponentId, Victim<'_>>) -> bool {
    range.owner.component().is_some_and(|id| victims.contains_key(id))
}

/// Carries moves and the allocation of activations out on a copy of the card.
fn carry_out(layout: &Layout, moves: &[Move], scratch: Bytes) -> Result<(), Box<Stuck>> {
    let mut layout = layout.clone();
    // Freed together, before the next move: one pass over the ranges is enough.
    let mut evicted: HashSet<&ComponentId> = HashSet::new();
    for each in moves {
        if let Move::Evict(component) = each {
            evicted.insert(&component.id);
            continue;
        }
        free_all(&mut layout, &mut evicted);
        let held = match each {
            Move::Evict(_) => Ok(()),
            Move::Trim => {
                layout.free(|range| range.owner == Owner::Slack);
                Ok(())
            }
            Move::Load(component, part) | Move::Resize(component, part) => layout.hold(component, *part),
        };
        if let Err(no_hole) = held {
            return Err(Box::new(Stuck { layout, no_hole }));
        }
    }
    free_all(&mut layout, &mut evicted);
    match layout.take_scratch(scratch) {
        Ok(_) => Ok(()),
        Err(no_hole) => Err(Box::new(Stuck { layout, no_hole })),
    }
}

fn free_all(layout: &mut Layout, evicted: &mut HashSet<&ComponentId>) {
    if !evicted.is_empty() {
        layout.free(|range| range.owner.component().is_some_and(|id| evicted.contains(id)));
        evicted.clear();
    }
}

/// The components to evict for a hole of so many bytes, such that their costs add up to the least: of all windows over the
/// addresses, each as short as it can be, the cheapest. `None` if not even all candidates leave one. Linear in the number of ranges.
fn cheapest_window<'v>(
    layout: &Layout,
    bytes: Bytes,
    candidates: &BTreeMap<&'v ComponentId, Victim<'_>>,
) -> Option<Vec<&'v ComponentId>> {
    // Holes and evictable ranges, in the order of their addresses.
    let holes = layout.holes().map(|hole| (hole.at, hole.bytes, None));
    let evictable = layout.used().iter().filter_map(|range| {
        let (id, _) = candidates.get_key_value(range.owner.component()?)?;
        Some((range.at, range.bytes, Some(*id)))
    });
    let mut spans: Vec<(u64, Bytes, Option<&ComponentId>)> = holes.chain(evictable).collect();
    spans.sort_unstable_by_key(|(at, ..)| *at);
    let cost_of = |id: &ComponentId| candidates.get(id).map_or(0, |v| v.cost);
    let mut within: BTreeMap<&ComponentId, u32> = BTreeMap::new();
    let (mut first, mut length, mut cost, mut end) = (0, Bytes::ZERO, 0_u64, 0);
    let mut best: Option<(u64, usize, usize)> = None;
    for (last, &(at, span, id)) in spans.iter().enumerate() {
        if at != end {
            // Something that stays lies between.
            (first, length, cost) = (last, Bytes::ZERO, 0);
            within.clear();
        }
        end = at + span.0;
        length += span;
        if let Some(id) = id {
            let count = within.entry(id).or_insert(0);
            cost += if *count == 0 { cost_of(id) } else { 0 };
            *count += 1;
        }
        while length - spans[first].1 >= bytes && first < last {
            let (_, span, id) = spans[first];
            length -= span;
            first += 1;
            let count = id.and_then(|id| Some((id, within.get_mut(id)?)));
            if let Some((id, count)) = count {
                *count -= 1;
                if *count == 0 {
                    cost -= cost_of(id);
                    within.remove(id);
                }
            }
        }
        if length >= bytes && best.is_none_or(|(least, ..)| cost < least) {
            best = Some((cost, first, last));
        }
    }
    let (_, first, last) = best?;
    let mut ids: Vec<&'v ComponentId> = Vec::new();
    for (_, _, id) in &spans[first..=last] {
        let known = id.and_then(|id| candidates.get_key_value(id));
        ids.extend(known.map(|(id, _)| *id).filter(|id| !ids.contains(id)));
    }
    Some(ids)
}
