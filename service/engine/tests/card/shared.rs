//! Stages of several orders in one pass.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use engine::messages::*;
use model::*;
use residency::Bytes;

use crate::support::{Bench, MIB, bench, families, request, write_model};

/// Writes an adapter of so many MiB.
fn write_adapter(folder: &Path, name: &str, mib: u64) -> AdapterFile {
    let path = folder.join(format!("{name}.json"));
    let text = format!(r#"{{"identity": "{name}", "bytes": {}}}"#, mib * MIB);
    std::fs::write(&path, text).unwrap();
    AdapterFile {
        name: name.to_owned(),
        path,
        kind: AdapterKind::Lora,
        ignores_unknown: false,
    }
}

/// The first round of a request with these adapters, as its own model plans it.
fn round(path: &Path, adapters: &[AdapterFile]) -> (Arc<dyn Model>, StageWork) {
    let base = families().open(path, &Precision::full(DType::F32)).unwrap();
    let model = match adapters {
        [] => base,
        _ => base.with_adapters(adapters).unwrap(),
    };
    let one = |file: &AdapterFile| AdapterUse {
        name: file.name.clone(),
        strength: StrengthCurve::constant(1.0).unwrap(),
        text_strength: 0.0,
    };
    let request = Request {
        slots: 4,
        adapters: adapters.iter().map(one).collect(),
        ..request(&*model)
    };
    let plan = model.plan(&request).unwrap();
    let plan = plan.into_iter().find(|plan| plan.name == "denoise").unwrap();
    let zeros = |value: &ValueShape| {
        let tensor = HostTensor {
            dtype: HostType::F32,
            shape: value.shape.clone(),
            data: vec![0; value.shape.iter().product::<usize>() * 4].into(),
        };
        (value.name.clone(), tensor)
    };
    let components = model.components().iter();
    let components = components.filter(|component| plan.components.contains(&component.name));
    let work = StageWork {
        components: components.cloned().collect(),
        later_stages: Vec::new(),
        later_request: None,
        later: Vec::new(),
        values: plan.takes.iter().map(zeros).collect(),
        plan,
        request,
        preview_interval_ms: 0,
    };
    (model, work)
}

/// An order for rounds with these adapters, each of a job of its own, as the queue makes it.
fn shared(bench: &mut Bench, path: &Path, sets: &[&[AdapterFile]]) -> Order {
    let rounds: Vec<StageWork> = sets.iter().map(|adapters| round(path, adapters).1).collect();
    let (own, others) = rounds.split_first().unwrap();
    let mut work = own.clone();
    let passes: Vec<&SharedPass> = others
        .iter()
        .filter_map(|other| other.plan.shared.as_ref())
        .collect();
    work.plan = work.plan.shared_with(&passes);
    for component in others.iter().flat_map(|other| &other.components) {
        if !work.plan.components.contains(&component.name) {
            work.plan.components.push(component.name.clone());
            work.components.push(component.clone());
        }
    }
    let mut order = bench.order(path, Work::Stage(Box::new(work)));
    let all = sets.iter().flat_map(|adapters| adapters.iter().cloned());
    order.model.adapters = all.collect();
    order.sharing = (others.iter().zip(1000..))
        .map(|(work, ticket)| Sharing {
            ticket: Ticket(ticket),
            job: format!("job {ticket}"),
            work: work.clone(),
        })
        .collect();
    order
}

/// The outcomes of the stages of an order, its own first.
fn outcomes(bench: &mut Bench, order: Order) -> Vec<Outcome> {
    let tickets: Vec<Ticket> = order.tickets().collect();
    bench.handle(Command::Run(Box::new(order)));
    let of = |ticket: &Ticket| {
        let mut ends = bench.link.events.iter().filter_map(|event| match event {
            Event::Finished { ticket: of, outcome } if of == ticket => Some(outcome.clone()),
            _ => None,
        });
        let end = ends.next().unwrap();
        assert!(ends.next().is_none(), "exactly one end for each");
        end
    };
    tickets.iter().map(of).collect()
}

#[test]
fn a_pass_of_stages_with_different_adapters_has_all_of_them_on_the_card() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "small", "");
    let (ink, oil) = (
        write_adapter(folder.path(), "ink", 3),
        write_adapter(folder.path(), "oil", 5),
    );
    let sets: [&[AdapterFile]; 3] = [&[], std::slice::from_ref(&ink), std::slice::from_ref(&oil)];
    let mut bench = bench("1GiB");
    let order = shared(&mut bench, &path, &sets);
    let together = outcomes(&mut bench, order);
    let residents = bench.card.ledger().residents();
    let residents: Vec<&str> = residents
        .map(|resident| resident.component.name.as_str())
        .collect();
    for name in [
        "transformer",
        "adapter:ink:transformer",
        "adapter:oil:transformer",
    ] {
        assert!(residents.contains(&name), "{residents:?}");
    }
    assert_eq!(bench.card.ledger().accounts().components, Bytes::mib(108));
    for (adapters, together) in sets.into_iter().zip(together) {
        let Outcome::Completed(together) = together else {
            panic!("{together:?}")
        };
        // As the model with its own adapters alone.
        let (_, work) = round(&path, adapters);
        let mut order = bench.order(&path, Work::Stage(Box::new(work)));
        order.model.adapters = adapters.to_vec();
        let alone = bench.completed(order);
        assert_eq!(together.values, alone.values);
        assert_eq!(together.predicted_scratch, Bytes(3 * alone.predicted_scratch.0));
        assert!(
            alone.resident_already.len() == 1 + adapters.len(),
            "nothing is loaded again"
        );
    }
}

#[test]
fn an_adapter_of_another_stage_that_has_gone_fails_the_order_before_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_model(folder.path(), "small", "");
    let gone = write_adapter(folder.path(), "gone", 3);
    let mut bench = bench("1GiB");
    let order = shared(&mut bench, &path, &[&[], std::slice::from_ref(&gone)]);
    std::fs::remove_file(&gone.path).unwrap();
    for outcome in outcomes(&mut bench, order) {
        assert!(
            matches!(outcome, Outcome::Failed(Failure::Model { .. })),
            "{outcome:?}"
        );
    }
    let (_, work) = round(&path, &[]);
    let alone = bench.order(&path, Work::Stage(Box::new(work)));
    bench.completed(alone);
}

/// A card on which a pass has kept handles of its components for the next.
fn after_a_pass(folder: &Path, card: &str) -> (Bench, PathBuf) {
    let path = write_model(folder, "small", "");
    let mut bench = bench(card);
    let order = shared(&mut bench, &path, &[&[], &[]]);
    for outcome in outcomes(&mut bench, order) {
        assert!(matches!(outcome, Outcome::Completed(_)), "{outcome:?}");
    }
    (bench, path)
}

#[test]
fn what_a_pass_keeps_does_not_hold_its_components_on_the_card() {
    let folder = tempfile::tempdir().unwrap();
    let (mut bench, path) = after_a_pass(folder.path(), "1GiB");
    bench.unload_all();
    assert_eq!(bench.card.ledger().accounts().components, Bytes::ZERO);
    assert_eq!(bench.card.ledger().accounts().slack, Bytes::ZERO);
    // The next pass loads them again.
    bench.link.events.clear();
    let order = shared(&mut bench, &path, &[&[], &[]]);
    for outcome in outcomes(&mut bench, order) {
        assert!(matches!(outcome, Outcome::Completed(_)), "{outcome:?}");
    }
}

#[test]
fn what_a_pass_keeps_gives_way_to_the_components_of_another_model() {
    let folder = tempfile::tempdir().unwrap();
    // Room for one transformer of 100 MiB, and not for two.
    let (mut bench, _) = after_a_pass(folder.path(), "180MiB");
    let other = write_model(folder.path(), "other", "");
    let (_, work) = round(&other, &[]);
    let order = bench.order(&other, Work::Stage(Box::new(work)));
    bench.completed(order);
    let residents = bench.card.ledger().residents();
    assert_eq!(residents.count(), 1, "the other model's alone");
}
