//! Stages on simulated cards that take time for what they copy and compute.

use std::path::{Path, PathBuf};

use engine::messages::*;
use gpu::{CardSpeeds, SimulatedSettings};
use residency::*;

use crate::support::*;

const STEPS: u32 = 8;
/// Floating-point operations of a step.
const STEP_FLOPS: u64 = 400_000_000_000;

/// A model whose transformer has 100 MiB in twenty blocks.
fn write_blocks(folder: &Path) -> PathBuf {
    let text = format!(
        r#"{{"name":"blocks","step_flops":{STEP_FLOPS},"components":[
            {{"name":"transformer","bytes":{},"identity":"blocks","blocks":20}}],
            "defaults":{{"width":64,"height":64,"steps":{STEPS}}}}}"#,
        100 * MIB
    );
    let path = folder.join("blocks.instant.json");
    std::fs::write(&path, text).unwrap();
    path
}

/// Links of a thousandth of PCIe 3, 4 and 5 at 16 lanes, for weights of a thousandth; and a disk that is slower than any.
#[test]
fn a_stage_takes_as_long_as_predicted() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_blocks(folder.path());
    let links = [
        "speed=12MB/s",
        "speed=24MB/s",
        "speed=50MB/s",
        "speed=50MB/s,disk=2MB/s",
    ];
    for (link, compute) in links
        .iter()
        .flat_map(|link| [100, 400].map(|gflops| (link, gflops)))
    {
        for memory in ["101MiB", "80MiB", "40MiB", "12MiB"] {
            let card = format!("{memory},{link},compute={compute}GFLOP/s");
            let speeds = card.parse::<SimulatedSettings>().unwrap().speeds();
            let mut bench = bench(&card);
            let order = bench.stage(&path, "denoise");
            let completed = bench.completed(order);
            let resident = bench.card.ledger().residents().next().unwrap();
            let pace = StageTime {
                passes: STEPS,
                pass_seconds: STEP_FLOPS as f64 / speeds.flops.unwrap() as f64,
                link: speeds.link.unwrap(),
            };
            let said = pace.predict([(&resident.component, resident.part)]);
            let (said, took) = (said.streamed * 1000.0, completed.run_ms as f64);
            assert!(
                (said - took).abs() < 0.1 * took,
                "{card}, {:?}: {said:.0} ms predicted, {took:.0} taken",
                resident.part
            );
            assert_eq!(resident.part == Part::WHOLE, memory == "101MiB");
        }
    }
}

#[test]
fn products_in_fp8_count_half_where_a_card_multiplies_so() {
    let flops = model::Flops { all: 10, fp8: 6 } + 4;
    assert_eq!((flops.on_card(false), flops.on_card(true)), (14, 11));
    let has = |options: &str| {
        let settings: SimulatedSettings = format!("1GiB{options}").parse().unwrap();
        gpu::SimulatedCard::describe_unopened(&settings).has_fp8_products()
    };
    let capable = ["", ",capability=8.6", ",capability=8.9", ",capability=12.0"].map(has);
    assert_eq!(capable, [false, false, true, true]);
}

#[test]
fn a_worker_that_is_ready_says_how_fast_its_card_is() {
    let mut bench = bench("1GiB,speed=24GB/s,disk=3GB/s,compute=150TFLOP/s");
    bench.card.announce(&mut bench.link);
    let known = CardSpeeds {
        link: Some(Bytes(3_000_000_000)),
        flops: Some(150_000_000_000_000),
    };
    assert!(matches!(&bench.link.events[..], [Event::Ready { speeds, .. }] if *speeds == known));
}
