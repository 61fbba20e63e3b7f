//! Admission: which rung of a stage runs on a ledger, and with which moves. The supervisor decides before it sends an
//! order, the worker again before it runs one: by the same function, so that they differ only if their ledgers do.

use model::Rung;
use residency::{
    Bytes, Component, Ledger, Millis, Move, Part, Policy, StageNeed, Verdict, WaitCause, freed_by, plan,
    plan_low_memory,
};

use crate::need::Need;

/// The decision for all rungs of a stage.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// This rung can run, after these moves.
    Run {
        /// Index of the rung.
        rung: usize,
        /// Evictions, then a trim if one is needed, then loads.
        moves: Vec<Move>,
    },
    /// No rung fits now. The rung with the least shortage would fit if claimed memory were released.
    Wait {
        /// Index of that rung.
        rung: usize,
        /// Its shortage in bytes.
        short: Bytes,
        /// The claim that has to be released.
        cause: WaitCause,
    },
    /// No rung fits on this card, even with all evictions.
    Never {
        /// Peak bytes of the smallest rung.
        needed: Bytes,
        /// The most that the card can provide.
        capacity: Bytes,
    },
}

/// An admission of a stage for which memory may be short.
#[derive(Clone, Debug, PartialEq)]
pub struct LowAdmission {
    /// Index of the rung with the smallest peak.
    pub rung: usize,
    /// The moves that free as much as possible, and loads.
    pub moves: Vec<Move>,
    /// Predicted shortage at the peak.
    pub short: Bytes,
}

/// Chooses a rung. One that keeps copies of weights comes first, if it needs nothing but loads. Then the first exact one that runs
/// without evictions, else the first exact one that runs (exact ones differ in the last bits where a library computes pieces of other
/// sizes by other algorithms, so the first is preferred); those that leave components in the machine's memory by the same rule only if
/// no other exact one runs, and approximate ones after that. An empty list is a plain load: the components without scratch, rung 0.
pub fn choose_rung(ledger: &Ledger, need: &Need, policy: Policy, now: Millis) -> Admission {
    let verdicts: Vec<(Kind, Verdict)> = ways(need)
        .map(|(kind, stage)| (kind, plan(ledger, &stage, policy, now)))
        .collect();
    let only_loads = |moves: &[Move]| only_loads(ledger, need, moves);
    let evicts_nothing = |moves: &[Move]| !evicts(ledger, moves);
    for kind in [
        Kind::WithCopies,
        Kind::Resident,
        Kind::FromHost,
        Kind::Approximate,
    ] {
        let runs = |suits: &dyn Fn(&[Move]) -> bool| {
            verdicts
                .iter()
                .enumerate()
                .find_map(|(rung, (of, verdict))| match verdict {
                    Verdict::Run { moves } if *of == kind && suits(moves) => Some(Admission::Run {
                        rung,
                        moves: moves.clone(),
                    }),
                    _ => None,
                })
        };
        let admission = match kind {
            Kind::WithCopies => runs(&only_loads),
            Kind::Resident | Kind::FromHost | Kind::Approximate => {
                runs(&evicts_nothing).or_else(|| runs(&|_| true))
            }
        };
        if let Some(admission) = admission {
            return admission;
        }
    }
    least_short(&verdicts)
}

/// Admits the rung with the smallest peak even if memory may be short; `None` if its components alone exceed the
/// card.
pub fn choose_rung_low_memory(
    ledger: &Ledger,
    need: &Need,
    policy: Policy,
    now: Millis,
) -> Option<LowAdmission> {
    let possible = ways(need).enumerate().filter(|(rung, _)| {
        let weights = need.on_rung(*rung, Some(Bytes::ZERO));
        !matches!(plan(ledger, &weights, policy, now), Verdict::Never { .. })
    });
    let (rung, (_, stage)) = possible.min_by_key(|(_, (_, stage))| stage.peak())?;
    let low = plan_low_memory(ledger, &stage, policy, now);
    Some(LowAdmission {
        rung,
        moves: low.moves,
        short: low.short,
    })
}

/// Bytes of a stage's peak that are not booked yet.
pub fn not_resident_yet(ledger: &Ledger, components: &[Component], scratch: Bytes) -> Bytes {
    let missing = components.iter().filter(|c| ledger.resident(&c.id).is_none());
    missing.map(|c| c.bytes_of(c.least())).sum::<Bytes>() + scratch
}

/// Kind of a way to run a stage, in the order in which they are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Exact and faster, with copies of weights in memory that is free.
    WithCopies,
    /// Exact, with all components resident.
    Resident,
    /// Exact, with some in the machine's memory.
    FromHost,
    Approximate,
}

impl Kind {
    fn of(rung: &Rung) -> Kind {
        match (rung.approximate, rung.from_host.is_empty()) {
            _ if !rung.copies.is_empty() => Kind::WithCopies,
            (true, _) => Kind::Approximate,
            (false, true) => Kind::Resident,
            (false, false) => Kind::FromHost,
        }
    }
}

/// All ways to run a stage, with their demands on the ledger; a load has one.
fn ways(need: &Need) -> impl Iterator<Item = (Kind, StageNeed)> {
    let rungs = need.rungs();
    let plain_load = rungs
        .is_empty()
        .then(|| (Kind::Resident, need.with_scratch(Bytes::ZERO)));
    let numbered = rungs.iter().enumerate();
    let on_rungs = numbered.map(|(index, rung)| (Kind::of(rung), need.on_rung(index, None)));
    plain_load.into_iter().chain(on_rungs)
}

/// Whether all components are on the card as a whole, or will be by loads alone.
fn only_loads(ledger: &Ledger, need: &Need, moves: &[Move]) -> bool {
    let is_whole = |c: &Component| ledger.resident(&c.id).is_none() || ledger.is_whole(&c.id);
    need.components.iter().all(is_whole) && moves.iter().all(|m| matches!(m, Move::Load(_, Part::WHOLE)))
}

/// Whether moves take something from the card that is to be read again. Of a component that is streamed already a few blocks more or
/// less are cheap, and results do not depend on them.
fn evicts(ledger: &Ledger, moves: &[Move]) -> bool {
    moves.iter().any(|m| match m {
        Move::Resize(component, _) if !ledger.is_whole(&component.id) => false,
        Move::Evict(_) | Move::Resize(..) | Move::Load(..) | Move::Trim => freed_by(ledger, m) > Bytes::ZERO,
    })
}

fn least_short(verdicts: &[(Kind, Verdict)]) -> Admission {
    let mut wait: Option<(usize, Bytes, WaitCause)> = None;
    let mut never = (Bytes(u64::MAX), Bytes::ZERO);
    for (rung, (_, verdict)) in verdicts.iter().enumerate() {
        match *verdict {
            Verdict::Wait { short, cause } if wait.is_none_or(|(_, least, _)| short < least) => {
                wait = Some((rung, short, cause));
            }
            Verdict::Never { needed, capacity } if needed < never.0 => never = (needed, capacity),
            _ => {}
        }
    }
    match wait {
        Some((rung, short, cause)) => Admission::Wait { rung, short, cause },
        None => Admission::Never {
            needed: never.0,
            capacity: never.1,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::{Role, StagePlan};
    use residency::{ComponentId, DriverTruth, Part, PartSize, Parts};

    const CARD: Bytes = Bytes::gib(10);

    fn component(name: &str, gib: u64) -> Component {
        Component {
            id: ComponentId::new(name),
            name: name.into(),
            bytes: Bytes::gib(gib),
            reload_seconds: 1.0,
            parts: residency::Parts::default(),
        }
    }

    fn rung(label: &str, gib: u64, approximate: bool) -> Rung {
        Rung {
            label: label.into(),
            scratch: Bytes::gib(gib),
            approximate,
            from_host: Vec::new(),
            copies: Vec::new(),
        }
    }

    fn ledger_with(residents: &[Component]) -> Ledger {
        let mut ledger = Ledger::new(CARD, Bytes::ZERO);
        for c in residents {
            ledger.begin_load(c, Part::WHOLE, Millis(0)).unwrap();
            ledger.complete_load(&c.id, Millis(0)).unwrap();
        }
        ledger
    }

    fn foreign(gib: u64) -> Ledger {
        let mut ledger = Ledger::new(CARD, Bytes::ZERO);
        let truth = DriverTruth {
            total: CARD,
            free: CARD - Bytes::gib(gib),
            ..DriverTruth::default()
        };
        ledger.reconcile(&truth);
        ledger
    }

    /// A stage with one component; without rungs, a load.
    fn decode(component: Component, rungs: &[Rung]) -> Need {
        let plan = StagePlan {
            name: "decode".into(),
            role: Role::Decode,
            components: vec![component.name.clone()],
            rungs: rungs.to_vec(),
            shape: String::new(),
            steps: 1,
            takes: Vec::new(),
            gives: Vec::new(),
            per_item: true,
            memo: None,
            section: None,
            shared: None,
            passes: model::Passes::default(),
            reads_media: true,
            preview: None,
        };
        Need {
            name: "decode".into(),
            components: vec![component],
            plan: (!rungs.is_empty()).then_some(plan),
            headroom: Bytes::ZERO,
            later: Vec::new(),
            model: Vec::new(),
        }
    }

    fn chosen(ledger: &Ledger, rungs: &[Rung]) -> Admission {
        choose_rung(
            ledger,
            &decode(component("vae", 1), rungs),
            Policy::Shared,
            Millis(0),
        )
    }

    #[test]
    fn exact_rungs_without_evictions_are_preferred_then_evictions_then_approximations() {
        let full = ledger_with(&[component("vae", 1), component("other", 5)]);
        let rungs = [
            rung("whole", 6, false),
            rung("strips", 4, false),
            rung("tiles", 1, true),
        ];
        assert!(matches!(chosen(&full, &rungs), Admission::Run { rung: 1, moves } if moves.is_empty()));
        let rungs = [rung("whole", 6, false), rung("tiles", 1, true)];
        assert!(matches!(chosen(&full, &rungs), Admission::Run { rung: 0, moves } if moves.len() == 1));
    }

    #[test]
    fn a_part_that_shrinks_further_is_preferred_to_another_rung() {
        let size = |streamed: u64| PartSize {
            bytes: Bytes::gib(7 - streamed),
            streamed: Bytes::gib(streamed),
            streamed_once: Bytes::ZERO,
        };
        let transformer = Component {
            parts: Parts::new(Bytes::gib(7), (1..=5).map(size), |_| {}),
            ..component("transformer", 7)
        };
        let rungs = [rung("whole", 4, false), rung("strips", 2, false)];
        let with = |part: Part| {
            let mut ledger = ledger_with(&[component("vae", 1)]);
            ledger.begin_load(&transformer, part, Millis(0)).unwrap();
            ledger.complete_load(&transformer.id, Millis(0)).unwrap();
            chosen(&ledger, &rungs)
        };
        let shrinks = |moves: &[Move]| matches!(moves, [Move::Resize(..)]);
        assert!(matches!(with(Part(1)), Admission::Run { rung: 0, moves } if shrinks(&moves)));
        // What is whole stays so, if another exact rung fits beside it.
        assert!(matches!(with(Part::WHOLE), Admission::Run { rung: 1, moves } if moves.is_empty()));
    }

    #[test]
    fn an_approximate_rung_is_preferred_to_waiting() {
        let rungs = [rung("whole", 6, false), rung("tiles", 1, true)];
        assert!(matches!(
            chosen(&foreign(7), &rungs),
            Admission::Run { rung: 1, .. }
        ));
    }

    #[test]
    fn a_wait_is_for_the_rung_with_the_least_shortage() {
        let rungs = [rung("whole", 8, false), rung("strips", 4, false)];
        let expected = Admission::Wait {
            rung: 1,
            short: Bytes::gib(2),
            cause: WaitCause::Foreign,
        };
        assert_eq!(chosen(&foreign(7), &rungs), expected);
        let never = [rung("whole", 80, false), rung("strips", 40, false)];
        let expected = Admission::Never {
            needed: Bytes::gib(41),
            capacity: CARD,
        };
        assert_eq!(chosen(&foreign(7), &never), expected);
    }

    #[test]
    fn an_empty_ladder_is_a_plain_load() {
        assert!(
            matches!(chosen(&ledger_with(&[]), &[]), Admission::Run { rung: 0, moves } if moves.len() == 1)
        );
    }

    #[test]
    fn low_memory_takes_the_smallest_rung_and_refuses_weights_that_exceed_the_card() {
        let rungs = [rung("whole", 20, false), rung("strips", 12, false)];
        let low =
            |c: Component| choose_rung_low_memory(&foreign(7), &decode(c, &rungs), Policy::Shared, Millis(0));
        let admission = low(component("vae", 1)).unwrap();
        assert_eq!((admission.rung, admission.short), (1, Bytes::gib(10)));
        assert_eq!(low(component("huge", 11)), None);
    }

    /// A sampling with a base of 6 GiB and an adapter of 3, which a second rung reads from the machine's memory.
    fn sample() -> (Need, [Component; 2]) {
        let parts = [component("base", 6), component("adapter", 3)];
        let mut need = decode(
            parts[0].clone(),
            &[rung("whole", 1, false), rung("host", 2, false)],
        );
        need.components.push(parts[1].clone());
        if let Some(plan) = &mut need.plan {
            plan.rungs[1].from_host = vec!["adapter".to_owned()];
        }
        (need, parts)
    }

    #[test]
    fn an_adapter_stays_in_host_memory_only_if_evictions_do_not_make_room() {
        let (need, [base, adapter]) = sample();
        let choose = |ledger: &Ledger| choose_rung(ledger, &need, Policy::Shared, Millis(1));
        let moves = |ledger: &Ledger| match choose(ledger) {
            Admission::Run { rung, moves } => (rung, moves),
            other => panic!("{other:?}"),
        };
        // All fits.
        let (rung, loads) = moves(&ledger_with(&[]));
        assert_eq!(
            (rung, loads),
            (
                0,
                vec![
                    Move::Load(base.clone(), Part::WHOLE),
                    Move::Load(adapter, Part::WHOLE)
                ]
            )
        );
        // An idle component is evicted for it.
        let (rung, _) = moves(&ledger_with(&[component("idle", 4)]));
        assert_eq!(rung, 0);
        // Another program leaves too little.
        let (rung, loads) = moves(&foreign(1));
        assert_eq!((rung, loads), (1, vec![Move::Load(base, Part::WHOLE)]));
        let least = need.least();
        assert_eq!((least.peak(), least.components.len()), (Bytes::gib(8), 1));
        assert!(matches!(choose(&foreign(3)), Admission::Wait { .. }));
    }

    /// A rung that keeps copies of weights takes memory that is free: nothing goes for it, and nothing is waited for.
    #[test]
    fn copies_of_weights_are_kept_only_in_memory_that_is_free() {
        let with_copies = Rung {
            copies: vec!["layer".to_owned()],
            ..rung("copies", 6, false)
        };
        let rungs = [with_copies, rung("whole", 2, false)];
        let taken = |ledger: &Ledger| match chosen(ledger, &rungs) {
            Admission::Run { rung, moves } => (rung, moves.len()),
            other => panic!("{other:?}"),
        };
        assert_eq!(taken(&ledger_with(&[])), (0, 1), "it loads what it needs");
        assert_eq!(
            taken(&ledger_with(&[component("vae", 1), component("idle", 3)])),
            (0, 0)
        );
        assert_eq!(
            taken(&ledger_with(&[component("vae", 1), component("idle", 4)])),
            (1, 0)
        );
        // Also where the other rung evicts, it evicts no more than that one needs.
        assert_eq!(
            taken(&ledger_with(&[component("vae", 1), component("idle", 8)])),
            (1, 1)
        );
        let wait = chosen(&foreign(8), &rungs);
        assert!(matches!(wait, Admission::Wait { rung: 1, .. }), "{wait:?}");
    }

    #[test]
    fn copies_of_weights_are_not_kept_beside_a_component_of_which_a_part_is_streamed() {
        let part = PartSize {
            bytes: Bytes::gib(1),
            streamed: Bytes::gib(1),
            streamed_once: Bytes::ZERO,
        };
        let transformer = Component {
            parts: Parts::new(Bytes::gib(2), std::iter::once(part), |_| {}),
            ..component("transformer", 2)
        };
        let with_copies = Rung {
            copies: vec!["layer".to_owned()],
            ..rung("copies", 4, false)
        };
        let need = decode(transformer.clone(), &[with_copies, rung("whole", 1, false)]);
        let taken = |part: Part| {
            let mut ledger = Ledger::new(CARD, Bytes::ZERO);
            ledger.begin_load(&transformer, part, Millis(0)).unwrap();
            ledger.complete_load(&transformer.id, Millis(0)).unwrap();
            match choose_rung(&ledger, &need, Policy::Shared, Millis(1)) {
                Admission::Run { rung, .. } => rung,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!((taken(Part::WHOLE), taken(Part(1))), (0, 1));
    }
}
