//! System memory as a card.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use residency::{Bytes, Component, ComponentId, DriverTruth, Holder, Part};
use serde::{Deserialize, Serialize};

use crate::allocator::{self, return_free};
use crate::card::{CardDescription, CardKind, CardSpeeds, Gpu, GpuError, Peers, Unloaded};
use crate::host_stream::{read_part, resize_on_host};
use crate::load::{LoadError, LoadPlan, LoadProgress};
use crate::reader::{LoadedFrom, read_tensors};
use crate::system::SystemReader;
use crate::tensors::ComponentTensors;

/// Settings of system memory as a card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuSettings {
    /// Limit on the memory used; the system's (or cgroup's) memory if `None` or larger.
    pub capacity: Option<Bytes>,
}

/// System memory and the processor. Component bytes are booked by the size of their tensors. Other bytes counted by
/// the [`crate::CountingAllocator`] are the process's context, and their growth during a stage is its activations;
/// both are zero if the allocator is not installed.
pub struct CpuCard {
    settings: CpuSettings,
    description: CardDescription,
    system: SystemReader,
    held: HashMap<ComponentId, CpuComponent>,
    /// The stage under measurement.
    stage: Option<Stage>,
    /// Measured when somebody first asks.
    speeds: OnceLock<CardSpeeds>,
}

/// State at the start of a stage.
struct Stage {
    /// All allocated bytes.
    allocated: Bytes,
    /// Allocated bytes that belong to no component.
    context: Bytes,
}

struct CpuComponent {
    tensors: Arc<ComponentTensors>,
    from: LoadedFrom,
    part: Part,
    booked: Bytes,
}

impl CpuCard {
    /// Opens system memory as a card.
    ///
    /// # Errors
    /// [`GpuError::Truth`] if the system does not report its memory.
    pub fn new(settings: CpuSettings) -> Result<CpuCard, GpuError> {
        let mut system = SystemReader::new()?;
        let total = capacity(&settings, system.read()?.total);
        Ok(CpuCard {
            settings,
            description: CardDescription {
                id: "cpu".to_owned(),
                kind: CardKind::Cpu,
                name: "system memory".to_owned(),
                total,
                compute_capability: None,
                compute_dtype: DType::F32.as_str().to_owned(),
                peers: Peers::none(),
            },
            system,
            held: HashMap::new(),
            stage: None,
            speeds: OnceLock::new(),
        })
    }

    /// Describes the card without opening it.
    ///
    /// # Errors
    /// [`GpuError::Truth`] if the system does not report its memory.
    pub fn describe_unopened(settings: CpuSettings) -> Result<CardDescription, GpuError> {
        CpuCard::new(settings).map(|card| card.description)
    }

    fn components(&self) -> Bytes {
        self.held.values().map(|held| held.booked).sum()
    }
}

/// Reads a component's tensors into system memory.
pub(crate) fn read_on_host(
    plan: &LoadPlan,
    progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
) -> Result<ComponentTensors, LoadError> {
    match plan {
        LoadPlan::Synthetic(synthetic) => {
            let (done, total) = (synthetic.bytes, synthetic.bytes);
            match progress(LoadProgress { done, total }) {
                ControlFlow::Break(()) => Err(LoadError::Cancelled),
                ControlFlow::Continue(()) => Ok(ComponentTensors::default()),
            }
        }
        LoadPlan::Files(sources) => {
            let tensors = read_tensors(sources, progress)?;
            Ok(ComponentTensors::of_weights(tensors))
        }
    }
}

/// The error for a part of a component that is not loaded.
pub(crate) fn not_there(component: &Component) -> LoadError {
    LoadError::Unsupported(format!("component {} is not there", component.id))
}

/// Side of the matrices whose product is timed: large enough for many threads.
const SIDE: usize = 1024;
/// Products that are timed, of which the fastest counts: the first starts threads.
const PRODUCTS: usize = 3;
/// No further product begins after this time.
const PRODUCTS_LIMIT: Duration = Duration::from_millis(50);

/// Floating-point operations a second of products in f32, timed for some milliseconds.
fn products() -> candle_core::Result<u64> {
    let zeros = Tensor::zeros((SIDE, SIDE), DType::F32, &Device::Cpu)?;
    let (all, mut fastest) = (Instant::now(), Duration::MAX);
    for _ in 0..PRODUCTS {
        let began = Instant::now();
        zeros.matmul(&zeros)?;
        fastest = fastest.min(began.elapsed());
        if all.elapsed() > PRODUCTS_LIMIT {
            break;
        }
    }
    let operations = 2.0 * (SIDE as f64).powi(3);
    Ok((operations / fastest.as_secs_f64().max(1e-9)) as u64)
}

fn capacity(settings: &CpuSettings, system_total: Bytes) -> Bytes {
    settings
        .capacity
        .map_or(system_total, |wanted| wanted.min(system_total))
}

impl Gpu for CpuCard {
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
        *self.speeds.get_or_init(|| {
            let flops = products().inspect_err(|error| {
                tracing::debug!(%error, "the speed of products cannot be measured");
            });
            CardSpeeds {
                link: None,
                flops: flops.ok(),
            }
        })
    }

    fn memory(&mut self) -> Result<DriverTruth, GpuError> {
        let system = self.system.read()?;
        let total = capacity(&self.settings, system.total);
        let components = self.components();
        let ours = allocator::live().max(components);
        let besides = ours - components;
        // Outside of a stage nothing is scratch: opened models, buffers of the service are context.
        let context = self.stage.as_ref().map_or(besides, |s| besides.min(s.context));
        let scratch = besides - context;
        // At most the memory that the system has available, and the rest of our own capacity.
        let free = system.available.min(total - ours);
        let others = total - ours - free;
        let holders = match others {
            Bytes::ZERO => Vec::new(),
            bytes => vec![Holder {
                name: "other processes".to_owned(),
                pid: None,
                bytes,
            }],
        };
        Ok(DriverTruth {
            total,
            free,
            components,
            scratch,
            slack: Bytes::ZERO,
            workspaces: Bytes::ZERO,
            context,
            holders,
            layout: None,
        })
    }

    fn load(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        let sources = plan.files()?;
        if self.held.contains_key(&component.id) {
            return Err(LoadError::Unsupported(format!(
                "component {} is already there",
                component.id
            )));
        }
        let needed = plan.placement(part).bytes_on_card(sources);
        if needed != component.bytes_of(part) {
            tracing::warn!(component = %component.id, planned = %needed, announced = %component.bytes_of(part),
                "the plan of a component has other bytes than were announced; the plan's are booked");
        }
        self.system.expire();
        let free = self.memory().map_err(|e| LoadError::Lost(e.to_string()))?.free;
        if needed > free {
            return Err(LoadError::OutOfMemory { needed, free });
        }
        let outcome = read_part(plan, part, progress);
        self.system.expire();
        match outcome {
            Ok((tensors, from)) => {
                let tensors = Arc::new(tensors);
                self.held.insert(
                    component.id.clone(),
                    CpuComponent {
                        tensors,
                        from,
                        part,
                        booked: needed,
                    },
                );
                Ok(())
            }
            Err(error) => {
                return_free();
                Err(error)
            }
        }
    }

    fn resize(
        &mut self,
        component: &Component,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        let free = self.memory().map_err(|e| LoadError::Lost(e.to_string()))?.free;
        let held = self.held.get_mut(&component.id);
        let held = held.ok_or_else(|| not_there(component))?;
        let plan = &held.from.plan;
        let booked = plan.placement(part).bytes_on_card(plan.files()?);
        if booked - held.booked > free {
            let needed = booked - held.booked;
            return Err(LoadError::OutOfMemory { needed, free });
        }
        resize_on_host(&mut held.tensors, &held.from, (held.part, part), progress)?;
        (held.part, held.booked) = (part, booked);
        return_free();
        self.system.expire();
        Ok(())
    }

    fn tensors(&self, id: &ComponentId) -> Result<Arc<ComponentTensors>, GpuError> {
        let held = self.held.get(id).ok_or_else(|| GpuError::NotLoaded(id.clone()))?;
        Ok(Arc::clone(&held.tensors))
    }

    fn unload(&mut self, id: &ComponentId) -> Result<Unloaded, GpuError> {
        let held = self.held.get(id).ok_or_else(|| GpuError::NotLoaded(id.clone()))?;
        let others = Arc::strong_count(&held.tensors) - 1;
        if others > 0 {
            return Err(GpuError::StillInUse(id.clone(), others));
        }
        let booked = held.booked;
        let before = allocator::thread_net();
        self.held.remove(id);
        let freed = before - allocator::thread_net();
        return_free();
        self.system.expire();
        // A cloned tensor keeps its storage: the bytes that this thread freed show it. Without the counting allocator
        // only the booking is known.
        let freed = if allocator::installed() {
            Bytes(freed.max(0) as u64).min(booked)
        } else {
            booked
        };
        Ok(Unloaded { booked, freed })
    }

    fn trim(&mut self) -> Result<Bytes, GpuError> {
        self.system.expire();
        let before = self.system.read()?.available;
        return_free();
        self.system.expire();
        Ok(self.system.read()?.available - before)
    }

    fn begin_stage(&mut self) {
        let allocated = allocator::mark();
        let context = allocated - self.components();
        self.stage = Some(Stage { allocated, context });
    }

    fn stage_peak(&mut self) -> Bytes {
        let stage = self.stage.take();
        stage.map_or(Bytes::ZERO, |s| allocator::peak_since_mark() - s.allocated)
    }
}
