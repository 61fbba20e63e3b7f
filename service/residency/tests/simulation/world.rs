//! One episode: a card, its ledger, a queue, clients, other programs, and a random number generator.

use std::collections::{BTreeMap, BTreeSet};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use residency::{
    Bytes, Component, ComponentId, HoldId, Ledger, Millis, Move, PinId, Policy, ReservationId, ScratchBook,
    Verdict, make_room, should_trim,
};

use crate::card::Card;
use crate::defect::{Defect, Invariant, Violation};
use crate::jobs::{Job, Kind, components, kinds};
use crate::mover::{Mover, Running};

const QUEUE_AT_MOST: usize = 6;

/// Event counts, so that a simulation that covers too little is noticed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stats {
    pub(crate) turns: u64,
    pub(crate) starts: u64,
    pub(crate) evictions: u64,
    pub(crate) shrinks: u64,
    pub(crate) refused_evictions: u64,
    pub(crate) failed_loads: u64,
    pub(crate) no_room: u64,
    pub(crate) out_of_memory: u64,
    pub(crate) never: u64,
    pub(crate) waits: [u64; 4],
    pub(crate) out_of_patience: u64,
    pub(crate) overtakings: u64,
    pub(crate) expired: u64,
    pub(crate) reservations: u64,
    pub(crate) idle_trims: u64,
}

impl Stats {
    fn all(&mut self) -> [&mut u64; 18] {
        let [late, leases, foreign, reserved] = &mut self.waits;
        [
            &mut self.turns,
            &mut self.starts,
            &mut self.evictions,
            &mut self.shrinks,
            &mut self.refused_evictions,
            &mut self.failed_loads,
            &mut self.no_room,
            &mut self.out_of_memory,
            &mut self.never,
            late,
            leases,
            foreign,
            reserved,
            &mut self.out_of_patience,
            &mut self.overtakings,
            &mut self.expired,
            &mut self.reservations,
            &mut self.idle_trims,
        ]
    }

    pub(crate) fn add(&mut self, other: &Stats) {
        let mut other = other.clone();
        self.all()
            .into_iter()
            .zip(other.all())
            .for_each(|(mine, more)| *mine += *more);
    }

    pub(crate) fn assert_everything_happened(&mut self) {
        assert!(
            self.all().iter().all(|&&mut count| count > 100),
            "something hardly ever happened"
        );
    }
}

pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) defect: Defect,
    pub(crate) stats: Stats,
    rng: ChaCha8Rng,
    pub(crate) now: Millis,
    pub(crate) card: Card,
    pub(crate) ledger: Ledger,
    pub(crate) book: ScratchBook,
    pub(crate) policy: Policy,
    components: Vec<Component>,
    pub(crate) kinds: Vec<Kind>,
    pub(crate) queue: Vec<Job>,
    next_job: u64,
    pub(crate) overtaken: BTreeMap<u64, u32>,
    pub(crate) lanes: usize,
    pub(crate) mover: Option<Mover>,
    pub(crate) running: Vec<Running>,
    pub(crate) pins: BTreeSet<ComponentId>,
    pub(crate) holds: BTreeMap<HoldId, (Vec<ComponentId>, Millis)>,
    /// Reservations and when each ends.
    reservations: BTreeMap<ReservationId, Millis>,
    /// Result of the last call of `chance`.
    pub(crate) chance_now: bool,
}

impl World {
    /// A seed's whole history, from an empty card to an empty card.
    pub(crate) fn episode(seed: u64, turns: u64, defect: Defect) -> Result<Stats, Violation> {
        let mut world = World::new(seed, defect);
        for _ in 0..turns {
            world.turn(true)?;
        }
        world.come_to_rest()?;
        Ok(world.stats)
    }

    fn new(seed: u64, defect: Defect) -> World {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let total = Bytes::gib(rng.random_range(8..=32));
        let card = Card::new(
            total,
            Bytes::mib(rng.random_range(200..900)),
            Bytes::mib(rng.random_range(0..200)),
        );
        let mut ledger = Ledger::new(total, Bytes::mib(rng.random_range(0..700)));
        ledger.reconcile(&card.truth());
        let components = components(&mut rng, total);
        let kinds = kinds(&mut rng, &components, total);
        let policy = if rng.random_bool(0.5) {
            Policy::Shared
        } else {
            Policy::Exclusive
        };
        let lanes = rng.random_range(1..=3);
        World {
            seed,
            defect,
            stats: Stats::default(),
            rng,
            now: Millis(1),
            card,
            ledger,
            book: ScratchBook::new(),
            policy,
            components,
            kinds,
            queue: Vec::new(),
            next_job: 0,
            overtaken: BTreeMap::new(),
            lanes,
            mover: None,
            running: Vec::new(),
            pins: BTreeSet::new(),
            holds: BTreeMap::new(),
            reservations: BTreeMap::new(),
            chance_now: false,
        }
    }

    fn turn(&mut self, open: bool) -> Result<(), Violation> {
        self.stats.turns += 1;
        let jump = if self.chance(0.05) { 3_000 } else { 60 };
        self.now = self.now.after(self.up_to(jump));
        self.card.tick(self.now);
        self.ledger.write_off_late(self.now);
        self.release_what_expired();
        if open {
            self.something_happens()?;
        }
        self.ledger.reconcile(&self.card.truth());
        self.run_stages()?;
        self.carry_on()?;
        self.run_queue()?;
        self.check()
    }

    /// The ledger keeps no times to live: its caller releases expired claims.
    fn release_what_expired(&mut self) {
        let (now, ledger) = (self.now, &mut self.ledger);
        let before = self.holds.len() + self.reservations.len();
        self.holds
            .retain(|id, (_, until)| *until > now || !ledger.release_hold(id));
        self.reservations
            .retain(|id, until| *until > now || !ledger.release_reservation(id));
        self.stats.expired += (before - self.holds.len() - self.reservations.len()) as u64;
    }

    fn something_happens(&mut self) -> Result<(), Violation> {
        let any = self.up_to(10) as usize;
        let id = self.components[any].id.clone();
        match self.up_to(19) {
            0..=6 if self.queue.len() < QUEUE_AT_MOST => {
                let kind = self.up_to(self.kinds.len() as u64) as usize;
                let low_memory = self.chance(0.03);
                self.queue.push(Job::new(self.next_job, kind, low_memory));
                self.next_job += 1;
            }
            7 if !self.queue.is_empty() && self.chance(0.3) => {
                let at = self.up_to(self.queue.len() as u64) as usize;
                self.queue.remove(at);
            }
            8 => {
                let share = self.share(0.0, 0.8);
                self.card.foreign += Bytes((self.card.free().0 as f64 * share) as u64);
            }
            9 | 10 => {
                let share = self.share(0.0, 0.5);
                self.card.foreign = Bytes((self.card.foreign.0 as f64 * share) as u64);
            }
            11 if self.pins.len() < 2 && self.chance(0.3) => {
                self.ledger.pin(PinId::new(&*id.0), vec![id.clone()]);
                self.pins.insert(id);
            }
            11 | 12 => assert_eq!(self.ledger.unpin(&PinId::new(&*id.0)), self.pins.remove(&id)),
            13 => {
                let hold = HoldId::new(format!("{}", self.up_to(2)));
                let until = self.now.after(1 + self.up_to(4_000));
                self.ledger.hold(hold.clone(), vec![id.clone()]);
                self.holds.insert(hold, (vec![id], until));
            }
            14 => {
                let hold = HoldId::new("0");
                assert_eq!(
                    self.ledger.release_hold(&hold),
                    self.holds.remove(&hold).is_some()
                );
            }
            15 => self.reserve()?,
            16 => {
                let id = ReservationId::new("0");
                assert_eq!(
                    self.ledger.release_reservation(&id),
                    self.reservations.remove(&id).is_some()
                );
            }
            17 => {
                let component = self.components[any].clone();
                self.evict(&component, None)?; // an explicit unload
            }
            _ => self.janitor(),
        }
        Ok(())
    }

    /// Another program asks for room, and sometimes takes it.
    fn reserve(&mut self) -> Result<(), Violation> {
        let id = ReservationId::new(format!("{}", self.up_to(2)));
        let bytes = Bytes((self.card.total.0 as f64 * self.share(0.0, 0.4)) as u64);
        self.ledger.reconcile(&self.card.truth());
        let Verdict::Run { moves } = make_room(&self.ledger, bytes, self.now) else {
            return Ok(());
        };
        if self.mover.is_some() {
            return Ok(()); // one mover at a time
        }
        self.carry_out(&moves)?;
        self.stats.reservations += 1;
        let until = self.now.after(1 + self.up_to(5_000));
        self.ledger.reserve(id.clone(), "another".into(), bytes);
        self.reservations.insert(id, until);
        if self.chance(0.5) {
            self.card.foreign += bytes.min(self.card.free());
        }
        Ok(())
    }

    fn janitor(&mut self) {
        if self.mover.is_none() && should_trim(&self.ledger, Bytes::mib(512)) {
            self.stats.idle_trims += 1;
            self.trim();
            self.ledger.reconcile(&self.card.truth());
        }
    }

    fn carry_out(&mut self, moves: &[Move]) -> Result<(), Violation> {
        for each in moves {
            match each {
                Move::Trim => self.trim(),
                Move::Evict(component) => {
                    assert!(
                        self.evict(component, Some(&[]))?,
                        "nothing changed since the plan"
                    )
                }
                Move::Resize(component, part) => {
                    assert!(
                        self.shrink(component, *part, &[])?,
                        "nothing changed since the plan"
                    );
                }
                Move::Load(component, _) => panic!("nobody asked for {component:?}"),
            }
        }
        self.ledger.reconcile(&self.card.truth());
        Ok(())
    }

    /// Ends an episode: no new jobs, all claims are released, other programs exit, all components are evicted. No
    /// byte may be left.
    fn come_to_rest(&mut self) -> Result<(), Violation> {
        self.card.foreign = Bytes::ZERO;
        for id in std::mem::take(&mut self.pins) {
            self.ledger.unpin(&PinId::new(&*id.0));
        }
        for id in std::mem::take(&mut self.holds).into_keys() {
            self.ledger.release_hold(&id);
        }
        for id in std::mem::take(&mut self.reservations).into_keys() {
            self.ledger.release_reservation(&id);
        }
        let mut patience = 5_000;
        while self.mover.is_some() || !self.running.is_empty() || !self.queue.is_empty() {
            self.turn(false)?;
            patience -= 1;
            if patience == 0 {
                let what = format!("{:?} never end: {:?}", self.queue, self.ledger.accounts());
                return Err(self.violation(Invariant::NoCardIdles, what));
            }
        }
        for component in self.components.clone() {
            let kept = self.defect == Defect::KeepsAComponentAtRest && component.id == self.components[5].id;
            if self.ledger.is_resident(&component.id) && !kept {
                assert!(
                    self.evict(&component, Some(&[]))?,
                    "something still needs {}",
                    component.id
                );
            }
        }
        self.card.tick(self.now.after(60_000));
        self.ledger.reconcile(&self.card.truth());
        self.check_rest()
    }

    pub(crate) fn chance(&mut self, p: f64) -> bool {
        self.chance_now = self.rng.random_bool(p);
        self.chance_now
    }

    pub(crate) fn up_to(&mut self, n: u64) -> u64 {
        self.rng.random_range(0..n.max(1))
    }

    pub(crate) fn share(&mut self, from: f64, to: f64) -> f64 {
        self.rng.random_range(from..to)
    }
}
