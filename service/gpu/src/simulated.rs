//! A simulated card: capacity, speeds of link and disk, the time of computations, faults and foreign holders are settings. Higher layers are tested on
//! it, and small real models run on it: their tensors live in system memory and are booked here by size.

mod book;
mod clock;
mod pace;
mod settings;
mod world;

use std::collections::HashMap;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device};
use residency::{Bytes, Component, ComponentId, DriverTruth, HostMemory, HostShare, Part};

use crate::allocator::{self, return_free};
use crate::card::{CardDescription, CardKind, CardSpeeds, Gpu, GpuError, Peers, Unloaded};
use crate::cpu::not_there;
use crate::faults::{FaultAction, FaultSchedule};
use crate::host_stream::{read_part, resize_on_host};
use crate::host_tier::{HoldsMemory, HostTier};
use crate::load::{LoadError, LoadPlan, LoadProgress, TensorSource};
use crate::reader::{LoadedFrom, Progress, report_progress};
use crate::tensors::ComponentTensors;

use book::SharedBook;
pub use book::{OutOfMemory, ScratchGuard, SimulatedAccounts, simulated_scratch};
pub use clock::{ManualClock, RealClock, SimulatedClock};
use pace::CardPace;
pub use settings::{FailLoad, LoadFailure, SettingsError, SimulatedSettings};
pub use world::SimulatedWorld;

/// Bytes that a synthetic load moves between two calls of `progress`.
const SYNTHETIC_CHUNK: u64 = 32 << 20;

/// A simulated card. See the module.
pub struct SimulatedCard {
    settings: SimulatedSettings,
    description: CardDescription,
    clock: Arc<dyn SimulatedClock>,
    book: SharedBook,
    held: HashMap<ComponentId, SimulatedComponent>,
    /// Blocks of components that left the card.
    host: HostTier<HostShare>,
    /// The times of what it copies and computes.
    pace: CardPace,
    faults: FaultSchedule,
    loads: u64,
    lost: Option<String>,
    /// Allocated bytes of this process when the stage began, for real computations on a simulated card.
    stage_baseline: Bytes,
}

struct SimulatedComponent {
    tensors: Arc<ComponentTensors>,
    from: LoadedFrom,
    part: Part,
    booked: Bytes,
    /// Whether it has tensors, and not only bytes.
    real: bool,
    /// Bytes of the machine's memory that a card would hold for its streamed blocks: those of the smallest part that it was in.
    on_host: HostShare,
}

impl HoldsMemory for HostShare {
    fn bytes(&self) -> Bytes {
        self.bytes
    }
}

impl SimulatedCard {
    /// Opens a card. `generation` counts the processes of this card from 1 (0 counts as 1): faults happen in the
    /// first `die-generations` only.
    pub fn new(
        settings: SimulatedSettings,
        generation: u64,
        world: SimulatedWorld,
        clock: Arc<dyn SimulatedClock>,
    ) -> SimulatedCard {
        if settings.foreign > Bytes::ZERO {
            world.hold("another process", None, settings.foreign);
        }
        if let Some(script) = &settings.world {
            world.follow(script.clone());
        }
        SimulatedCard {
            description: SimulatedCard::describe_unopened(&settings),
            book: SharedBook::new(&settings, world, Arc::clone(&clock)),
            pace: CardPace::new(settings.speeds(), Arc::clone(&clock)),
            faults: FaultSchedule::new(settings.faults.clone(), generation, settings.die_generations),
            settings,
            clock,
            held: HashMap::new(),
            host: HostTier::default(),
            loads: 0,
            lost: None,
            stage_baseline: Bytes::ZERO,
        }
    }

    /// Describes a card with these settings without opening it.
    pub fn describe_unopened(settings: &SimulatedSettings) -> CardDescription {
        CardDescription {
            id: format!("sim:{}", settings.index),
            kind: CardKind::Simulated,
            name: format!("simulated card of {}", settings.capacity),
            total: settings.capacity,
            compute_capability: settings.capability,
            compute_dtype: DType::F32.as_str().to_owned(),
            peers: match settings.has_peers {
                true => Peers::All,
                false => Peers::none(),
            },
        }
    }

    /// All accounts now, in more detail than [`Gpu::memory`]: a driver does not report memory that is being freed.
    pub fn accounts(&self) -> SimulatedAccounts {
        self.book.lock().accounts()
    }

    /// Allocates activation memory until the guard is dropped. Slack is used before free memory.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing is allocated then.
    pub fn use_scratch(&self, bytes: Bytes) -> Result<ScratchGuard, OutOfMemory> {
        self.book.use_scratch(bytes)
    }

    /// How many of these bytes of streamed blocks the machine has memory for, beside those of other components. The rest is read from
    /// files.
    fn room_on_host(&mut self, wanted: Bytes) -> Bytes {
        match self.host.make_room(wanted, self.in_use_on_host(), None) {
            Err(LoadError::HostMemory { available, .. }) => available,
            Ok(()) | Err(_) => wanted,
        }
    }

    fn in_use_on_host(&self) -> Bytes {
        self.held.values().map(|held| held.on_host.bytes).sum()
    }

    fn check_alive(&self) -> Result<(), String> {
        self.lost.clone().map_or(Ok(()), Err)
    }

    /// The failure that the settings inject into the load that begins now.
    fn failing(&mut self) -> Option<LoadFailure> {
        self.loads += 1;
        self.settings
            .fail_loads
            .iter()
            .find(|fail| fail.nth == self.loads)
            .map(|fail| fail.how)
    }

    /// Transfers the bytes of a plan, which are booked already.
    fn transfer(
        &self,
        plan: &LoadPlan,
        (part, booked): (Part, Bytes),
        progress: Progress<'_>,
    ) -> Result<(ComponentTensors, LoadedFrom), LoadError> {
        let began_ms = self.clock.now_ms();
        match plan {
            LoadPlan::Synthetic(_) => {
                let (mut done, total) = (Bytes::ZERO, booked);
                loop {
                    self.wait_for_transfer(began_ms, done);
                    if progress(LoadProgress { done, total }).is_break() {
                        return Err(LoadError::Cancelled);
                    }
                    if done == total {
                        let tensors = self.pace.paced(ComponentTensors::default(), plan, part);
                        return Ok((tensors, LoadedFrom::whole(plan)));
                    }
                    done = (done + Bytes(SYNTHETIC_CHUNK)).min(total);
                }
            }
            LoadPlan::Files(_) => {
                let (tensors, from) = read_part(plan, part, &mut |reported| {
                    self.wait_for_transfer(began_ms, reported.done);
                    progress(reported)
                })?;
                Ok((self.pace.paced(tensors, plan, part), from))
            }
        }
    }

    /// Keeps another part of a component.
    fn change(
        &self,
        component: &Component,
        held: &mut SimulatedComponent,
        (part, booked): (Part, Bytes),
        progress: Progress<'_>,
    ) -> Result<(), LoadError> {
        let grown = booked - held.booked;
        let before = self.book.lock().take_component(component, part, grown)?;
        let began_ms = self.clock.now_ms();
        let mut paced = |reported: LoadProgress| {
            self.wait_for_transfer(began_ms, reported.done);
            progress(reported)
        };
        let outcome = match held.from.plan {
            LoadPlan::Files(_) => {
                resize_on_host(&mut held.tensors, &held.from, (held.part, part), &mut paced)
            }
            LoadPlan::Synthetic(_) => report_progress(&mut paced, grown, grown),
        };
        match outcome {
            Ok(()) => {
                let tensors = std::mem::take(&mut held.tensors);
                held.tensors = match Arc::try_unwrap(tensors) {
                    Ok(tensors) => Arc::new(self.pace.paced(tensors, &held.from.plan, part)),
                    Err(in_use) => in_use,
                };
                self.release();
                let given_up = held.booked - booked;
                self.book.lock().return_part(&component.id, given_up, before);
                (held.part, held.booked) = (part, booked);
                Ok(())
            }
            Err(error) => {
                self.book.lock().undo(&component.id, grown, &before);
                Err(error)
            }
        }
    }

    /// Sleeps for the configured duration of freeing memory.
    fn release(&self) {
        if self.settings.release_ms > 0 {
            self.clock.sleep_ms(self.settings.release_ms);
        }
    }

    /// Sleeps until `done` bytes can have been transferred at the card's speed, counted from `began_ms`.
    fn wait_for_transfer(&self, began_ms: u64, done: Bytes) {
        let Some(speed) = self.settings.speeds().link else {
            return;
        };
        let speed = u128::from(speed.0);
        let needs_ms = u64::try_from(u128::from(done.0) * 1000 / speed).unwrap_or(u64::MAX);
        let left_ms = began_ms
            .saturating_add(needs_ms)
            .saturating_sub(self.clock.now_ms());
        if left_ms > 0 {
            self.clock.sleep_ms(left_ms);
        }
    }
}

/// Bytes on the card of a part.
fn bytes_in_part(component: &Component, plan: &LoadPlan, part: Part) -> Bytes {
    match plan {
        LoadPlan::Files(sources) => plan.placement(part).bytes_on_card(sources),
        LoadPlan::Synthetic(whole) if part == Part::WHOLE => whole.bytes,
        LoadPlan::Synthetic(_) => component.bytes_of(part),
    }
}

fn file_of(plan: &LoadPlan) -> PathBuf {
    let first = match plan {
        LoadPlan::Files(sources) => sources
            .iter()
            .flat_map(TensorSource::files)
            .next()
            .map(|file| file.to_path_buf()),
        LoadPlan::Synthetic(_) => None,
    };
    first.unwrap_or_else(|| Path::new("a simulated checkpoint").to_owned())
}

impl Gpu for SimulatedCard {
    fn describe(&self) -> &CardDescription {
        &self.description
    }

    fn device(&self) -> &Device {
        &Device::Cpu
    }

    fn compute_dtype(&self) -> DType {
        DType::F32
    }

    fn speeds(&self) -> CardSpeeds {
        self.settings.speeds()
    }

    fn memory(&mut self) -> Result<DriverTruth, GpuError> {
        self.check_alive().map_err(GpuError::Lost)?;
        let mut book = self.book.lock();
        let accounts = book.accounts();
        Ok(DriverTruth {
            total: self.settings.capacity,
            free: accounts.free,
            components: accounts.components,
            scratch: accounts.scratch,
            slack: accounts.slack,
            workspaces: accounts.workspaces,
            context: accounts.context,
            holders: accounts.foreign,
            layout: book.layout().cloned(),
        })
    }

    fn load(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        self.check_alive().map_err(LoadError::Lost)?;
        if self.held.contains_key(&component.id) {
            return Err(LoadError::Unsupported(format!(
                "component {} is already there",
                component.id
            )));
        }
        let booked = bytes_in_part(component, plan, part);
        let failing = self.failing();
        match failing {
            Some(LoadFailure::Io) => {
                let source = io::Error::other("the settings of the simulated card ask for this");
                return Err(LoadError::Io {
                    file: file_of(plan),
                    source,
                });
            }
            Some(LoadFailure::Damaged) => {
                let problem = "the settings of the simulated card ask for this".to_owned();
                return Err(LoadError::Damaged {
                    file: file_of(plan),
                    problem,
                });
            }
            Some(LoadFailure::OutOfMemory) | None => {}
        }
        let streamed = component.size_of(part).all_streamed();
        let kept = self
            .host
            .take(&component.id)
            .map_or(Bytes::ZERO, |kept| kept.bytes);
        let streamed = streamed.min(kept.max(self.room_on_host(streamed)));
        self.book.lock().take_component(component, part, booked)?;

        let mut failed_at = None;
        let outcome = self.transfer(plan, (part, booked), &mut |reported| {
            if failing.is_some() && reported.done.0 >= booked.0 / 2 {
                failed_at = Some(reported.done);
                return ControlFlow::Break(());
            }
            progress(reported)
        });
        match (outcome, failed_at) {
            (Ok((tensors, from)), _) => {
                let real = matches!(plan, LoadPlan::Files(_));
                self.held.insert(
                    component.id.clone(),
                    SimulatedComponent {
                        tensors: Arc::new(tensors),
                        from,
                        part,
                        booked,
                        real,
                        on_host: HostShare {
                            component: component.clone(),
                            bytes: kept.max(streamed),
                        },
                    },
                );
                Ok(())
            }
            (Err(error), failed_at) => {
                self.book.lock().return_component(&component.id, booked, true);
                match failed_at {
                    Some(done) => Err(LoadError::OutOfMemory {
                        needed: booked - done,
                        free: self.accounts().free,
                    }),
                    None => Err(error),
                }
            }
        }
    }

    fn resize(
        &mut self,
        component: &Component,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        self.check_alive().map_err(LoadError::Lost)?;
        // Taken out while it changes: the transfer reads the settings of the card.
        let held = self.held.remove(&component.id);
        let mut held = held.ok_or_else(|| not_there(component))?;
        let booked = bytes_in_part(component, &held.from.plan, part);
        let outcome = self.change(component, &mut held, (part, booked), progress);
        let more = component.size_of(part).all_streamed() - held.on_host.bytes;
        let more = more.min(self.room_on_host(held.on_host.bytes + more) - held.on_host.bytes);
        if outcome.is_ok() {
            held.on_host.bytes += more;
        }
        self.held.insert(component.id.clone(), held);
        outcome
    }

    fn tensors(&self, id: &ComponentId) -> Result<Arc<ComponentTensors>, GpuError> {
        self.check_alive().map_err(GpuError::Lost)?;
        let held = self.held.get(id).ok_or_else(|| GpuError::NotLoaded(id.clone()))?;
        Ok(Arc::clone(&held.tensors))
    }

    fn unload(&mut self, id: &ComponentId) -> Result<Unloaded, GpuError> {
        self.check_alive().map_err(GpuError::Lost)?;
        let held = self.held.get(id).ok_or_else(|| GpuError::NotLoaded(id.clone()))?;
        let others = Arc::strong_count(&held.tensors) - 1;
        if others > 0 {
            return Err(GpuError::StillInUse(id.clone(), others));
        }
        let (booked, real) = (held.booked, held.real);
        self.release();
        if let Some(left) = self.held.remove(id) {
            let in_use = self.in_use_on_host();
            self.host.keep(id.clone(), left.on_host, in_use);
        }
        if self.faults.at("unload") == Some(FaultAction::Leak) {
            // The bytes stay allocated until the process ends.
            return Err(GpuError::Leaked {
                component: id.clone(),
                bytes: booked,
                tensors: vec!["as its settings say".to_owned()],
            });
        }
        if real {
            return_free();
        }
        self.book.lock().return_component(id, booked, false);
        // Lagging bytes are not free yet, and a driver would not show them as free.
        let freed = if self.settings.lag_ms == 0 {
            booked
        } else {
            Bytes::ZERO
        };
        Ok(Unloaded { booked, freed })
    }

    fn trim(&mut self) -> Result<Bytes, GpuError> {
        self.check_alive().map_err(GpuError::Lost)?;
        self.release();
        return_free();
        Ok(self.book.lock().trim())
    }

    fn on_host(&self) -> HostMemory {
        let on_card = self.held.values().map(|held| &held.on_host);
        let all = on_card.chain(self.host.kept().map(|(_, kept)| kept));
        let held = all.filter(|share| share.bytes > Bytes::ZERO);
        HostMemory {
            limit: self.host.limit,
            components: held
                .map(|share| (share.component.id.clone(), share.clone()))
                .collect(),
        }
    }

    fn limit_on_host(&mut self, limit: Option<Bytes>) {
        self.host.limit = limit;
    }

    fn forget_on_host(&mut self, id: &ComponentId) {
        self.host.forget(id);
    }

    fn largest_allocation(&mut self, enough: Bytes) -> Result<Bytes, GpuError> {
        let truth = self.memory()?;
        let hole = truth.layout.map_or(truth.free, |layout| layout.largest_hole());
        Ok(hole.min(self.settings.largest.unwrap_or(hole)).min(enough))
    }

    fn begin_stage(&mut self) {
        self.book.make_current();
        self.book.lock().begin_stage();
        self.stage_baseline = allocator::mark();
    }

    fn expect_passes_of(&mut self, flops: u64) {
        self.pace.expect_passes_of(flops);
    }

    fn stage_peak(&mut self) -> Bytes {
        self.pace.finish();
        let simulated = self.book.lock().stage_peak();
        if !self.held.values().any(|held| held.real) {
            return simulated;
        }
        // A real computation allocates no scratch on the card. Its peak must be learned all the same, or the planner
        // would learn a peak of zero.
        simulated.max(allocator::peak_since_mark() - self.stage_baseline)
    }

    fn fault_at(&mut self, place: &str) -> Option<FaultAction> {
        let action = self.faults.at(place)?;
        if matches!(action, FaultAction::Lose | FaultAction::Poison) {
            self.lost = Some(format!("its settings say so, at {place}"));
        }
        Some(action)
    }
}
