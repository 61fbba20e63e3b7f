//! Random commands in any order conserve bytes and leak nothing.

use std::path::PathBuf;

use engine::messages::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use residency::*;

use crate::support::*;

const SCHEDULES: u64 = 3_000;
const COMMANDS: usize = 14;

/// Four models that need between a third of the smallest card and more than all of it.
fn models(folder: &tempfile::TempDir) -> Vec<PathBuf> {
    let greedy = format!(
        r#","real_scratch":{{"encode_text":{},"decode":{}}}"#,
        60 * MIB,
        300 * MIB
    );
    vec![
        write_model(folder.path(), "plain", ""),
        write_model(folder.path(), "other", ""),
        write_model(folder.path(), "greedy", &greedy),
        write_model(
            folder.path(),
            "faulty",
            r#","not_finite_at_step":2,"panic_at":"decode""#,
        ),
    ]
}

fn card(random: &mut ChaCha8Rng) -> String {
    let mut card = format!("{}MiB,context=5MiB", random.random_range(90..420));
    if random.random() {
        card += ",slack=keep";
    }
    if random.random_ratio(1, 3) {
        card += &format!(",lag={}ms", random.random_range(1..400));
    }
    if random.random() {
        card += ",speed=1GiB/s";
    }
    for how in ["oom", "io", "damaged"] {
        if random.random_ratio(1, 4) {
            card += &format!(",fail-load={}:{how}", random.random_range(1..8));
        }
    }
    card
}

fn all_ids(bench: &Bench, models: &[PathBuf]) -> Vec<ComponentId> {
    models
        .iter()
        .flat_map(|m| {
            bench
                .open(m)
                .components()
                .iter()
                .map(|c| c.id.clone())
                .collect::<Vec<_>>()
        })
        .collect()
}

fn some<T: Clone>(random: &mut ChaCha8Rng, of: &[T], most: usize) -> Vec<T> {
    (0..random.random_range(0..=most))
        .map(|_| of[random.random_range(0..of.len())].clone())
        .collect()
}

fn order(bench: &mut Bench, models: &[PathBuf], random: &mut ChaCha8Rng) -> Order {
    let model = &models[random.random_range(0..models.len())];
    let mut order = match random.random_range(0..5) {
        0 => bench.load(model, &["transformer", "vae"]),
        1 => bench.stage(model, "encode_text"),
        2 | 3 => bench.stage(model, "denoise"),
        _ => bench.stage(model, "decode"),
    };
    order.policy = if random.random() {
        Policy::Shared
    } else {
        Policy::Exclusive
    };
    order.allow_low_memory = random.random_ratio(1, 4);
    order
}

/// One random command or an advance of the clock, with its postconditions.
fn turn(bench: &mut Bench, models: &[PathBuf], ids: &[ComponentId], random: &mut ChaCha8Rng) {
    match random.random_range(0..10) {
        0..=4 => {
            let order = order(bench, models, random);
            let cancel = random.random_ratio(1, 5).then(|| random.random_range(0..12));
            let before = bench.calls().len();
            bench.link.cancel_in.set(cancel);
            let outcome = bench.run(order);
            bench.link.cancel_in.set(None);
            if let Outcome::Never { .. } = outcome {
                let moves = bench.calls()[before..]
                    .iter()
                    .filter(|c| c.starts_with("load"))
                    .count();
                assert_eq!(moves, 0, "nothing is loaded for what never runs");
            }
        }
        5 => {
            let components = some(random, ids, 6);
            bench.handle(Command::Unload { id: 1, components });
        }
        6 => {
            let standing = Standing {
                pins: vec![("pinned".to_owned(), some(random, ids, 1))],
                holds: vec![("h".into(), some(random, ids, 2))],
                reservations: some(random, &[("r".into(), "x".into(), Bytes::mib(30))], 1),
                foreign_before: None,
            };
            bench.handle(Command::Standing(standing));
        }
        7 => {
            let bytes = Bytes::mib(random.random_range(0..200));
            bench.handle(Command::MakeRoom { id: 2, bytes });
        }
        8 => {
            let bytes = Bytes::mib(random.random_range(0..80));
            bench.world.hold("blender", Some(41), bytes);
            bench.tick_after(random.random_range(0..3000));
        }
        _ => bench.tick_after(random.random_range(0..500)),
    }
}

/// No pinned or held component left in this turn, unless the claim came later.
fn stayed(before: &Ledger, after: &Ledger) {
    for resident in before.residents().filter(|r| r.pinned || r.held > 0) {
        assert!(
            after.is_resident(&resident.component.id),
            "{} left, claimed as it was",
            resident.component.id
        );
    }
}

#[test]
fn random_commands_conserve_bytes_and_leak_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let models = models(&folder);
    // Panics of a model are part of the schedules, and are not printed.
    std::panic::set_hook(Box::new(|info| {
        let text = info.to_string();
        if !text.contains("asks for this panic") {
            eprintln!("{text}");
        }
    }));
    for seed in 0..SCHEDULES {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let card = card(&mut random);
        let mut bench = bench(&card);
        let at_start = bench.seen.borrow().accounts.clone();
        let ids = all_ids(&bench, &models);
        for _ in 0..COMMANDS {
            let before = bench.card.ledger().clone();
            turn(&mut bench, &models, &ids, &mut random);
            stayed(&before, bench.card.ledger());
        }
        bench.world.hold("blender", None, Bytes::ZERO);
        bench.unload_all();
        bench.tick_after(40_000);
        let ledger = bench.card.ledger();
        assert_eq!(ledger.residents().count(), 0, "seed {seed}, {card}");
        assert_eq!(ledger.accounts().components, Bytes::ZERO, "seed {seed}, {card}");
        assert_eq!(bench.seen.borrow().accounts, at_start, "seed {seed}, {card}");
        assert_eq!(ledger.usable(), at_start.free, "seed {seed}, {card}");
    }
}
