//! Loads by a worker's half.

use engine::card::{Card, CardSettings, Flow, Link, SystemClock};
use engine::library::OpenModel;
use engine::messages::{Command, Event, ModelLocation, Order, Outcome, StageWork, Ticket, Work};
use gpu::{CpuCard, CpuSettings, Gpu};
use model::{Role, Rung, StagePlan, Values};
use pipelines::FamilyList;
use residency::{Bytes, Component, ComponentId, Policy};

pub(crate) fn cpu() -> CpuCard {
    CpuCard::new(CpuSettings { capacity: None }).unwrap()
}

/// A worker's half over a card, without headroom.
pub(crate) fn card(gpu: impl Gpu + 'static, families: FamilyList) -> Card {
    let settings = CardSettings {
        headroom: Bytes::ZERO,
        ..CardSettings::default()
    };
    Card::new(Box::new(gpu), families, settings, Box::new(SystemClock::new())).unwrap()
}

/// How a command ended, and what is resident then.
#[derive(Default)]
pub(crate) struct Ends {
    pub(crate) outcome: Option<Outcome>,
    pub(crate) resident: Vec<ComponentId>,
}

impl Link for Ends {
    fn emit(&mut self, event: Event) {
        match event {
            Event::Finished { outcome, .. } => self.outcome = Some(outcome),
            Event::Snapshot(ledger) => {
                self.resident = ledger.residents().map(|r| r.component.id.clone()).collect();
            }
            _ => {}
        }
    }
    fn cancelled(&self, _ticket: Ticket) -> bool {
        false
    }
}

/// Has a card carry out a command.
pub(crate) fn carry_out(card: &mut Card, command: Command) -> Ends {
    let mut ends = Ends::default();
    assert_eq!(card.handle(command, &mut ends), Flow::Continue);
    ends
}

/// Has a card load components of a model.
pub(crate) fn load(card: &mut Card, ticket: u64, model: ModelLocation, components: Vec<Component>) -> Ends {
    run(card, ticket, model, Work::Load(components))
}

/// A stage that samples on all components of a model, in this way.
pub(crate) fn stage(open: &OpenModel, rung: Rung) -> Work {
    let names: Vec<String> = open.components.iter().map(|c| c.name.clone()).collect();
    Work::Stage(Box::new(StageWork {
        plan: StagePlan::of("denoise", Role::Sample, names, vec![rung]),
        components: open.components.clone(),
        later_stages: Vec::new(),
        later_request: None,
        later: Vec::new(),
        request: open.model.defaults(),
        values: Values::new(),
        preview_interval_ms: 0,
    }))
}

/// Has a card run an order.
pub(crate) fn run(card: &mut Card, ticket: u64, model: ModelLocation, work: Work) -> Ends {
    let order = Order {
        ticket: Ticket(ticket),
        job: "an order".into(),
        model,
        work,
        policy: Policy::Shared,
        allow_low_memory: false,
        headroom: Bytes::ZERO,
        components: Vec::new(),
        sharing: Vec::new(),
        together: None,
        is_ahead: false,
    };
    carry_out(card, Command::Run(Box::new(order)))
}
