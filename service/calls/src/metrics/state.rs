//! The state of cards, components and the queue at this moment, as gauges. It is read from the reports that the queue publishes.

use engine::JobState;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::OfCard;
use crate::ServiceStatus;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfAccount {
    card: String,
    account: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfComponent {
    card: String,
    component: String,
    id: String,
    /// `card` or `host`, the machine's memory.
    tier: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfState {
    state: &'static str,
}

fn gauge(bytes: residency::Bytes) -> i64 {
    i64::try_from(bytes.0).unwrap_or(i64::MAX)
}

/// The gauges of a status.
pub(super) fn registry_of(status: &ServiceStatus) -> Registry {
    let mut registry = Registry::with_prefix("moored");
    let memory = Family::<OfAccount, Gauge>::default();
    let total = Family::<OfCard, Gauge>::default();
    let ready = Family::<OfCard, Gauge>::default();
    let restarts = Family::<OfCard, Gauge>::default();
    let components = Family::<OfComponent, Gauge>::default();
    for card in &status.report.cards {
        let of = OfCard {
            card: card.description.id.clone(),
        };
        let accounts = card.ledger.accounts();
        for (account, bytes) in [
            ("components", accounts.components),
            ("scratch", accounts.scratch),
            ("slack", accounts.slack),
            ("workspaces", accounts.workspaces),
            ("context", accounts.context),
            ("foreign", accounts.foreign),
            ("unexplained", accounts.unexplained),
            ("free", accounts.free),
        ] {
            let card = of.card.clone();
            memory
                .get_or_create(&OfAccount { card, account })
                .set(gauge(bytes));
        }
        total.get_or_create(&of).set(gauge(card.ledger.total()));
        ready.get_or_create(&of).set(i64::from(card.state.is_ready()));
        restarts.get_or_create(&of).set(i64::from(card.restarts));
        for resident in card.ledger.residents() {
            let of_component = OfComponent {
                card: of.card.clone(),
                component: resident.component.name.clone(),
                id: resident.component.id.to_string(),
                tier: "card",
            };
            components
                .get_or_create(&of_component)
                .set(gauge(resident.bytes()));
        }
        for share in card.ledger.host().components.values() {
            let of_component = OfComponent {
                card: of.card.clone(),
                component: share.component.name.clone(),
                id: share.component.id.to_string(),
                tier: "host",
            };
            components.get_or_create(&of_component).set(gauge(share.bytes));
        }
    }
    let jobs = Family::<OfState, Gauge>::default();
    for state in [
        JobState::Held,
        JobState::Queued,
        JobState::Waiting,
        JobState::Running,
    ] {
        let count = status.report.jobs.iter().filter(|job| job.state == state).count();
        jobs.get_or_create(&OfState {
            state: state.as_str(),
        })
        .set(i64::try_from(count).unwrap_or(i64::MAX));
    }
    let single = |value: i64| {
        let gauge = Gauge::<i64>::default();
        gauge.set(value);
        gauge
    };
    registry.register_with_unit(
        "card_memory",
        "Memory of a card by account; the accounts add up to its capacity",
        Unit::Bytes,
        memory,
    );
    registry.register_with_unit(
        "card_capacity",
        "Capacity of a card, or the service's share of it",
        Unit::Bytes,
        total,
    );
    registry.register("card_ready", "1 while a worker serves the card", ready);
    registry.register(
        "card_worker_restarts",
        "Workers of a card that were lost",
        restarts,
    );
    registry.register_with_unit(
        "component",
        "Bytes of a component on a card, or in the machine's memory for it",
        Unit::Bytes,
        components,
    );
    registry.register("jobs", "Jobs that have not ended, by state", jobs);
    let report = &status.report;
    registry.register_with_unit(
        "latents",
        "Bytes of latents that are kept for clients",
        Unit::Bytes,
        single(gauge(report.latent_bytes)),
    );
    registry.register_with_unit(
        "texts",
        "Bytes of encoded prompts that are kept for other jobs",
        Unit::Bytes,
        single(gauge(report.text_bytes)),
    );
    registry.register_with_unit(
        "uptime",
        "Time since the service started",
        Unit::Seconds,
        single(i64::try_from(status.uptime.as_secs()).unwrap_or(i64::MAX)),
    );
    registry
}
