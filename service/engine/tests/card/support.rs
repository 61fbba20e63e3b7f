//! The card under test: simulated, with a manual clock, and a listener that records and checks events.

use pipelines::FamilyList;
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use candle_core::DType;
use engine::card::{Card, CardSettings, Clock, Faults, Flow, Link};
use engine::messages::*;
use gpu::*;
use model::*;
use residency::*;

use crate::watched::{Watch, Watched};

pub(crate) const MIB: u64 = 1 << 20;

/// The test's clock, shared with the simulated card.
pub(crate) struct TestClock(pub(crate) ManualClock);

impl Clock for TestClock {
    fn now(&self) -> Millis {
        Millis(self.0.now_ms())
    }
    fn sleep(&self, duration: std::time::Duration) {
        self.0.advance_ms(duration.as_millis() as u64);
    }
}

/// The simulated card's own accounts, independent of the ledger.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) accounts: SimulatedAccounts,
    /// `load vae`, `unload vae`, `trim`, in order.
    pub(crate) calls: Vec<String>,
}

/// Records the calls of the simulated card.
struct Probe(Rc<RefCell<Seen>>);

impl Watch<SimulatedCard> for Probe {
    fn after(&mut self, card: &SimulatedCard, call: String) {
        self.after_reading(card);
        self.0.borrow_mut().calls.push(call);
    }
    fn after_reading(&mut self, card: &SimulatedCard) {
        self.0.borrow_mut().accounts = card.accounts();
    }
}

/// Records every event, and checks its invariants.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) events: Vec<Event>,
    /// Cancels the attempt after this many polls.
    pub(crate) cancel_in: Cell<Option<u32>>,
}

impl Link for Recorder {
    fn emit(&mut self, event: Event) {
        if let Event::Snapshot(ledger) = &event {
            assert_eq!(
                ledger.accounts().sum(),
                ledger.total(),
                "bytes are conserved in {ledger:#?}"
            );
            let last = self.events.iter().rev().find_map(|e| match e {
                Event::Snapshot(ledger) => Some(ledger),
                _ => None,
            });
            assert_ne!(last, Some(ledger), "the same snapshot twice");
            let leaves_in_use = |r: &Resident| r.state == ResidentState::Evicting && r.leases > 0;
            assert!(
                !ledger.residents().any(leaves_in_use),
                "nothing leaves that a stage runs on"
            );
        }
        self.events.push(event);
    }

    fn cancelled(&self, _ticket: Ticket) -> bool {
        let left = self.cancel_in.get();
        self.cancel_in.set(left.map(|n| n.saturating_sub(1)));
        left == Some(0)
    }
}

/// Records injected faults, and returns.
#[derive(Clone, Default)]
pub(crate) struct RememberedFaults(pub(crate) Rc<RefCell<Vec<String>>>);

impl Faults for RememberedFaults {
    fn die(&self, place: &str) {
        self.0.borrow_mut().push(format!("die {place}"));
    }
    fn hang(&self, place: &str) {
        self.0.borrow_mut().push(format!("hang {place}"));
    }
}

/// The state of a test.
pub(crate) struct Bench {
    pub(crate) card: Card,
    pub(crate) link: Recorder,
    pub(crate) clock: ManualClock,
    pub(crate) world: SimulatedWorld,
    pub(crate) seen: Rc<RefCell<Seen>>,
    pub(crate) faults: RememberedFaults,
    families: FamilyList,
    tickets: u64,
}

pub(crate) fn families() -> FamilyList {
    FamilyList::new(vec![Box::new(pipelines::instant::Instant)])
}

/// A bench with a card like `32GiB,lag=200ms`, headroom 0.
pub(crate) fn bench(card: &str) -> Bench {
    bench_with(
        card,
        CardSettings {
            headroom: Bytes::ZERO,
            ..CardSettings::default()
        },
    )
}

pub(crate) fn bench_with(card: &str, settings: CardSettings) -> Bench {
    let clock = ManualClock::default();
    let world = SimulatedWorld::new();
    let simulated: SimulatedSettings = card.parse().unwrap();
    let simulated = SimulatedCard::new(simulated, 1, world.clone(), Arc::new(clock.clone()));
    let seen = Rc::new(RefCell::new(Seen::default()));
    let faults = RememberedFaults::default();
    let probe = Watched {
        card: simulated,
        watch: Probe(Rc::clone(&seen)),
    };
    let card = Card::new(
        Box::new(probe),
        families(),
        settings,
        Box::new(TestClock(clock.clone())),
    )
    .unwrap();
    let card = card.with_faults(Box::new(faults.clone()));
    Bench {
        card,
        link: Recorder::default(),
        clock,
        world,
        seen,
        faults,
        families: families(),
        tickets: 0,
    }
}

/// One of the sample models.
pub(crate) fn sample(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/instant");
    tests.join(format!("{name}.instant.json"))
}

/// Writes a model with four components of its own, of 100, 20, 40 and 10 MiB; `more` is added to its file.
pub(crate) fn write_model(folder: &Path, name: &str, more: &str) -> PathBuf {
    let component = |kind: &str, mib: u64| {
        format!(
            r#"{{"name":"{kind}","bytes":{},"identity":"{name}-{kind}"}}"#,
            mib * MIB
        )
    };
    let components = [
        component("transformer", 100),
        component("text_encoder", 20),
        component("text_encoder_2", 40),
        component("vae", 10),
    ];
    let scratch = format!(
        r#"{{"encode_text":{},"denoise":{},"decode":{}}}"#,
        4 * MIB,
        8 * MIB,
        64 * MIB
    );
    let text = format!(
        r#"{{"name":"{name}","components":[{}],"scratch":{scratch}{more},"defaults":{{"width":64,"height":64}}}}"#,
        components.join(",")
    );
    let path = folder.join(format!("{name}.instant.json"));
    std::fs::write(&path, text).unwrap();
    path
}

pub(crate) fn request(model: &dyn Model) -> Request {
    Request {
        prompt: "a red cube".into(),
        seed: 7,
        max_sequence_length: 16,
        ..model.defaults()
    }
}

impl Bench {
    pub(crate) fn open(&self, path: &Path) -> Arc<dyn Model> {
        self.families.open(path, &Precision::full(DType::F32)).unwrap()
    }

    pub(crate) fn order(&mut self, path: &Path, work: Work) -> Order {
        self.tickets += 1;
        Order {
            ticket: Ticket(self.tickets),
            job: format!("job {}", self.tickets),
            model: ModelLocation {
                key: path.display().to_string(),
                path: path.to_owned(),
                quantization: model::Quantization::NONE,
                adapters: Vec::new(),
                kept: Vec::new(),
                identities: Vec::new(),
            },
            work,
            policy: Policy::Shared,
            allow_low_memory: false,
            headroom: Bytes::ZERO,
            components: Vec::new(),
            sharing: Vec::new(),
            together: None,
            is_ahead: false,
        }
    }

    /// An order for a stage, with these inputs.
    pub(crate) fn stage(&mut self, path: &Path, stage: &str) -> Order {
        let request = request(&*self.open(path));
        self.stage_of(path, stage, request)
    }

    pub(crate) fn stage_of(&mut self, path: &Path, stage: &str, request: Request) -> Order {
        let model = self.open(path);
        let plan = model.plan(&request).unwrap();
        let plan = plan
            .into_iter()
            .find(|plan| plan.name == stage)
            .unwrap()
            .with_previews();
        let values = plan.takes.iter().map(|value| {
            let bytes = value.shape.iter().product::<usize>() * 4;
            let tensor = HostTensor {
                dtype: HostType::F32,
                shape: value.shape.clone(),
                data: vec![0; bytes].into(),
            };
            (value.name.clone(), tensor)
        });
        let values = values.collect();
        let components = model.components().iter();
        let components = components.filter(|c| plan.components.contains(&c.name)).cloned();
        let work = StageWork {
            components: components.collect(),
            later_stages: Vec::new(),
            later_request: None,
            later: Vec::new(),
            plan,
            request,
            values,
            preview_interval_ms: 0,
        };
        self.order(path, Work::Stage(Box::new(work)))
    }

    /// An order to load some components of a model.
    pub(crate) fn load(&mut self, path: &Path, names: &[&str]) -> Order {
        let model = self.open(path);
        let components = model
            .components()
            .iter()
            .filter(|c| names.contains(&c.name.as_str()))
            .cloned()
            .collect();
        self.order(path, Work::Load(components))
    }

    pub(crate) fn handle(&mut self, command: Command) {
        assert_eq!(self.card.handle(command, &mut self.link), Flow::Continue);
        self.check();
    }

    pub(crate) fn run(&mut self, order: Order) -> Outcome {
        let ticket = order.ticket;
        self.handle(Command::Run(Box::new(order)));
        let ends = self.link.events.iter().filter_map(|event| match event {
            Event::Finished { ticket: t, outcome } if *t == ticket => Some(outcome),
            _ => None,
        });
        let mut ends: Vec<Outcome> = ends.cloned().collect();
        assert_eq!(ends.len(), 1, "exactly one end for each order");
        ends.remove(0)
    }

    pub(crate) fn run_stage(&mut self, path: &Path, stage: &str) -> Outcome {
        let order = self.stage(path, stage);
        self.run(order)
    }

    pub(crate) fn completed(&mut self, order: Order) -> Completed {
        match self.run(order) {
            Outcome::Completed(completed) => *completed,
            other => panic!("it did not complete: {other:?}"),
        }
    }

    pub(crate) fn answer(&mut self, command: Command) -> Answer {
        self.handle(command);
        match self.link.events.last() {
            Some(Event::Answer { answer, .. }) => answer.clone(),
            other => panic!("no answer, but {other:?}"),
        }
    }

    pub(crate) fn tick_after(&mut self, milliseconds: u64) {
        self.clock.advance_ms(milliseconds);
        assert_eq!(self.card.tick(&mut self.link), Flow::Continue);
        self.check();
    }

    /// Invariants while no work is under way.
    pub(crate) fn check(&self) {
        let ledger = self.card.ledger();
        assert_eq!(ledger.accounts().sum(), ledger.total());
        assert_eq!(ledger.leases(), 0, "nothing is leased at rest");
        assert!(
            ledger.residents().all(|r| r.state == ResidentState::Resident),
            "nothing moves at rest"
        );
        let booked: Bytes = ledger.residents().map(residency::Resident::bytes).sum();
        assert_eq!(
            booked,
            self.seen.borrow().accounts.components,
            "the card holds what is booked"
        );
        assert_eq!(
            self.seen.borrow().accounts.scratch,
            Bytes::ZERO,
            "no scratch at rest"
        );
    }

    /// Names of the resident components, sorted.
    pub(crate) fn resident(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .card
            .ledger()
            .residents()
            .map(|r| r.component.id.to_string())
            .collect();
        names.sort();
        names
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        self.seen.borrow().calls.clone()
    }

    /// All that was done so far, as it was reported.
    pub(crate) fn progress(&self) -> Vec<Progress> {
        let progress = self.link.events.iter().filter_map(|event| match event {
            Event::Progress {
                progress: Progress::Begun,
                ..
            } => None,
            Event::Progress { progress, .. } => Some(progress.clone()),
            _ => None,
        });
        progress.collect()
    }

    /// Unloads everything: the accounts must equal those at the start.
    pub(crate) fn unload_all(&mut self) {
        let components = self
            .card
            .ledger()
            .residents()
            .map(|r| r.component.id.clone())
            .collect();
        self.handle(Command::Standing(Standing::default()));
        self.handle(Command::Unload { id: 0, components });
        self.handle(Command::Trim { id: 0 });
    }
}
