//! The time that a simulated card takes for streamed blocks and for computations, by its clock.
//!
//! A card has one queue of copies and one of computations, as a real one has two streams. [`Schedule`] decides which copy begins when,
//! as on a real card; here each has a duration, and whoever enters a block sleeps until the work before it is over and the block has
//! arrived. The computation of a block then takes its share of the pass, by its bytes.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use residency::{Bytes, Part};

use super::clock::SimulatedClock;
use crate::blocks::{BlockPlace, Placement, Uses};
use crate::card::CardSpeeds;
use crate::load::{LoadError, LoadPlan};
use crate::schedule::Schedule;
use crate::tensors::{ComponentTensors, Streams, WeightStream};

/// The two queues of a card, and how much a pass of its stage computes. Clones are one.
#[derive(Clone)]
pub(super) struct CardPace {
    speeds: CardSpeeds,
    clock: Arc<dyn SimulatedClock>,
    queues: Arc<Mutex<Queues>>,
}

/// Until when each queue has work, in milliseconds of the clock.
#[derive(Clone, Copy, Debug, Default)]
struct Queues {
    copying_until: f64,
    computing_until: f64,
    flops_of_pass: u64,
}

impl CardPace {
    pub(super) fn new(speeds: CardSpeeds, clock: Arc<dyn SimulatedClock>) -> CardPace {
        CardPace {
            speeds,
            clock,
            queues: Arc::default(),
        }
    }

    /// A stage begins whose passes compute this much.
    pub(super) fn expect_passes_of(&self, flops: u64) {
        self.lock().flops_of_pass = flops;
    }

    /// Sleeps until what is queued is computed.
    pub(super) fn finish(&self) {
        let until = self.lock().computing_until;
        self.sleep_until(until);
    }

    /// The tensors of a part, with a stream that takes the time for their blocks. Without speeds nothing takes time.
    pub(super) fn paced(&self, tensors: ComponentTensors, plan: &LoadPlan, part: Part) -> ComponentTensors {
        if self.speeds == CardSpeeds::default() {
            return tensors;
        }
        let inner = match plan {
            LoadPlan::Files(_) => tensors.stream(),
            LoadPlan::Synthetic(_) => WeightStream::default(),
        };
        let sources = plan.tensors();
        let (all, streamed) = (Placement::of_all(&sources), plan.placement(part));
        let each_pass = all
            .streamed
            .iter()
            .filter(|block| block.place.uses == Uses::EachPass);
        let bytes: u64 = each_pass.clone().map(|block| block.bytes).sum();
        let stream = PacedStream {
            inner,
            pace: self.clone(),
            shares: each_pass
                .map(|block| (block.place, block.bytes as f64 / bytes.max(1) as f64))
                .collect(),
            streamed: Mutex::new(Streamed {
                index: streamed
                    .streamed
                    .iter()
                    .map(|block| block.place)
                    .zip(0..)
                    .collect(),
                schedule: Schedule::of(&streamed.streamed),
                bytes: streamed.streamed.iter().map(|block| block.bytes).collect(),
                arrives_at: vec![0.0; streamed.streamed.len()],
            }),
        };
        tensors.streaming(WeightStream::new(Arc::new(stream)))
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
        // Plain numbers, which are valid even if a caller panicked between two of them.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until a time of the clock, less the fraction of a millisecond, which the queues keep.
    fn sleep_until(&self, until_ms: f64) {
        let left = (until_ms as u64).saturating_sub(self.clock.now_ms());
        if left > 0 {
            self.clock.sleep_ms(left);
        }
    }
}

/// The stream of a component on a simulated card, which takes time.
struct PacedStream {
    /// Brings the bytes, where there are any.
    inner: WeightStream,
    pace: CardPace,
    /// The share of each block in the computation of a pass.
    shares: HashMap<BlockPlace, f64>,
    streamed: Mutex<Streamed>,
}

/// The streamed blocks of a component, in the order of their use.
struct Streamed {
    index: HashMap<BlockPlace, usize>,
    schedule: Schedule,
    bytes: Vec<u64>,
    /// When each is in the ring, in milliseconds of the clock.
    arrives_at: Vec<f64>,
}

impl Streamed {
    /// The stage comes to a block: queues copies and the computation of the block, which takes `computing` milliseconds. Returns when
    /// that begins.
    fn enter(
        &mut self,
        place: BlockPlace,
        queues: &mut Queues,
        (now_ms, computing_ms): (f64, f64),
        link: Option<Bytes>,
    ) -> f64 {
        let before_is_over = queues.computing_until.max(now_ms);
        let turn = self.schedule.enter(self.index.get(&place).copied());
        for copy in turn.copies {
            // Those whose bytes it overwrites were used by the work before.
            let bytes = self.bytes.get(copy.block).copied().unwrap_or(0);
            let takes_ms = link.map_or(0.0, |link| bytes as f64 * 1000.0 / link.0 as f64);
            queues.copying_until = queues.copying_until.max(before_is_over) + takes_ms;
            if let Some(arrives_at) = self.arrives_at.get_mut(copy.block) {
                *arrives_at = queues.copying_until;
            }
        }
        let arrived = turn.entered.and_then(|entered| self.arrives_at.get(entered));
        let begins = arrived.map_or(before_is_over, |arrived| before_is_over.max(*arrived));
        queues.computing_until = begins + computing_ms;
        begins
    }
}

impl Streams for PacedStream {
    fn enter(&self, place: BlockPlace) -> Result<(), LoadError> {
        let begins = {
            let mut streamed = self.streamed.lock().unwrap_or_else(PoisonError::into_inner);
            let mut queues = self.pace.lock();
            let flops = queues.flops_of_pass as f64 * self.shares.get(&place).copied().unwrap_or(0.0);
            let computing_ms = self
                .pace
                .speeds
                .flops
                .map_or(0.0, |speed| flops * 1000.0 / speed as f64);
            let times = (self.pace.clock.now_ms() as f64, computing_ms);
            streamed.enter(place, &mut queues, times, self.pace.speeds.link)
        };
        self.pace.sleep_until(begins);
        self.inner.enter(place)
    }

    fn is_whole(&self) -> bool {
        let streamed = self.streamed.lock().unwrap_or_else(PoisonError::into_inner);
        streamed.bytes.is_empty()
    }
}

impl fmt::Debug for PacedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PacedStream")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::DType;
    use residency::{Component, ComponentId, StageTime};

    use super::*;
    use crate::load::{Stored, Synthetic, TensorSource};
    use crate::simulated::ManualClock;

    const LAYERS: usize = 57;
    const STEPS: u32 = 6;

    /// FLUX.1-dev's blocks, with so many bytes for a number: 19 of twice the bytes, then 38; and the modulation of each.
    fn flux(bytes_of_number: f64) -> LoadPlan {
        let file: Arc<Path> = Path::new("model.safetensors").into();
        let tensor = |name: String, numbers: f64, block| {
            let bytes = (numbers * bytes_of_number) as usize;
            let full = TensorSource::full(name, &file, [], Stored::U8, vec![1, bytes], DType::U8);
            TensorSource { block, ..full }
        };
        let mut all = vec![tensor("embedder".to_owned(), 60e6, None)];
        for number in 0..LAYERS {
            let size = if number < 19 { 2.0 } else { 1.0 };
            let (once, each) = (BlockPlace::once(number), BlockPlace::each_pass(number));
            all.push(tensor(format!("{number}.norm"), size * 42e6, Some(once)));
            all.push(tensor(format!("{number}.up"), size * 70e6, Some(each)));
            all.push(tensor(format!("{number}.down"), size * 43e6, Some(each)));
        }
        LoadPlan::Files(all)
    }

    fn component_of(plan: &LoadPlan) -> Component {
        Component {
            id: ComponentId::new("transformer"),
            name: "transformer".to_owned(),
            bytes: plan.bytes(),
            reload_seconds: 0.0,
            parts: plan.parts(),
        }
    }

    /// Milliseconds of a stage of so many steps on a simulated card: those of modulation first, then all blocks in each step.
    fn simulated(card: &str, flops: u64, plan: &LoadPlan, part: Part, blocks: usize) -> u64 {
        let settings: crate::SimulatedSettings = card.parse().unwrap();
        let clock = ManualClock::default();
        let pace = CardPace::new(settings.speeds(), Arc::new(clock.clone()));
        let stream = pace.paced(ComponentTensors::default(), plan, part).stream();
        pace.expect_passes_of(flops);
        for number in 0..blocks {
            stream.enter(BlockPlace::once(number)).unwrap();
        }
        for _ in 0..STEPS {
            for number in 0..blocks {
                stream.enter(BlockPlace::each_pass(number)).unwrap();
            }
        }
        pace.finish();
        clock.now_ms()
    }

    /// Formats, with bytes of a number; links and disks; and the card's memory for it, as a share of the whole.
    #[test]
    fn predicted_times_are_within_a_tenth_of_simulated_ones() {
        let (formats, links) = (
            [("bf16", 2.0), ("8-bit", 1.0), ("4-bit", 0.56)],
            [
                "speed=12GB/s",
                "speed=24GB/s",
                "speed=50GB/s",
                "speed=50GB/s,disk=2GB/s",
            ],
        );
        let computations = [(75_u64, 630_u64), (75, 150), (20, 630), (600, 150)];
        for (format, bytes_of_number) in formats {
            let plan = flux(bytes_of_number);
            let component = component_of(&plan);
            let bytes = component.bytes.0 as f64;
            for (link, (tflop, speed)) in links
                .iter()
                .flat_map(|link| computations.map(|each| (link, each)))
            {
                for share in [1.0, 0.8, 0.6, 0.4, 0.2] {
                    let part = component.largest_within(Bytes((bytes * share) as u64));
                    let part = part.unwrap_or(component.least());
                    let card = format!("80GiB,{link},compute={speed}TFLOP/s");
                    let speeds = card.parse::<crate::SimulatedSettings>().unwrap().speeds();
                    let pace = StageTime {
                        passes: STEPS,
                        pass_seconds: tflop as f64 / speed as f64,
                        link: speeds.link.unwrap(),
                    };
                    let said = pace.predict([(&component, part)]).streamed * 1000.0;
                    let took = simulated(&card, tflop * 1_000_000_000_000, &plan, part, LAYERS) as f64;
                    assert!(
                        (said - took).abs() < 0.1 * took,
                        "{format}, {card}, {tflop} TFLOP, {share}: {said:.0} ms predicted, {took:.0} simulated"
                    );
                }
            }
        }
    }

    #[test]
    fn copies_hide_behind_the_computation_and_a_card_without_speeds_takes_no_time() {
        let plan = LoadPlan::Synthetic(Synthetic {
            bytes: Bytes(10 << 10),
            blocks: 10,
        });
        let part = Part(plan.parts().sizes().len() as u32);
        let all = |card: &str| simulated(card, 10_000_000_000_000, &plan, part, 10);
        // A pass computes for 10 s and copies for 5: the first block is waited for.
        assert_eq!(all("1MB,speed=2KiB/s,compute=1TFLOP/s"), 60_500);
        // It copies for 20 s: that is how long a pass takes, and the computation of the last block comes after it.
        assert_eq!(all("1MB,speed=512B/s,compute=1TFLOP/s"), 121_000);
        assert_eq!(all("1MB,speed=2KiB/s"), 30_000);
        assert_eq!(all("1MB"), 0);
        let whole = simulated(
            "1MB,speed=2KiB/s,compute=1TFLOP/s",
            10_000_000_000_000,
            &plan,
            Part::WHOLE,
            10,
        );
        assert_eq!(whole, 60_000);
    }
}
