//! The state of cards, components and the queue at this moment, as gauges. It is read from the reports that the queue publishes.

use std::fmt;
use std::sync::Arc;

use engine::JobState;
use engine::queue::StatusReport;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::{Registry, Unit};

use super::OfCard;
use crate::ServiceStatus;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfAccount {
    card: String,
    account: &'static str,
}

/// The bytes of each component, which may be thousands: they are written as they are, without a table of them.
#[derive(Debug)]
struct Components(Arc<StatusReport>);

impl Collector for Components {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Bytes of a component on a card, or in the machine's memory for it";
        let mut metric =
            encoder.encode_descriptor("component", help, Some(&Unit::Bytes), MetricType::Gauge)?;
        for card in &self.0.cards {
            let on_card = card.ledger.residents();
            let on_card = on_card.map(|resident| (&resident.component, resident.bytes(), "card"));
            let on_host = card.ledger.host().components.values();
            let on_host = on_host.map(|share| (&share.component, share.bytes, "host"));
            for (component, bytes, tier) in on_card.chain(on_host) {
                let labels = [
                    ("card", &*card.description.id),
                    ("component", &*component.name),
                    ("id", &*component.id.0),
                    ("tier", tier),
                ];
                ConstGauge::new(gauge(bytes)).encode(metric.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
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
    registry.register_collector(Box::new(Components(status.report.clone())));
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
