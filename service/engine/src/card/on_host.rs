//! Components that stages use from the machine's memory: read once, and kept for later stages, within a bound.

use std::ops::ControlFlow;
use std::sync::Arc;

use gpu::ComponentTensors;
use model::ModelFile;
use residency::{Bytes, Component, ComponentId};

use super::moves::MoveError;
use super::stage::StageAttempt;
use super::{Card, Link};

/// The kept components, the least recently used first.
#[derive(Debug)]
pub(super) struct OnHost {
    bound: Bytes,
    kept: Vec<HostComponent>,
}

#[derive(Debug)]
struct HostComponent {
    id: ComponentId,
    bytes: Bytes,
    tensors: Arc<ComponentTensors>,
}

impl OnHost {
    /// An empty cache of at most `bound` bytes.
    pub(super) fn new(bound: Bytes) -> OnHost {
        OnHost {
            bound,
            kept: Vec::new(),
        }
    }

    /// A component, if it is kept. It becomes the most recently used.
    fn get(&mut self, id: &ComponentId) -> Option<Arc<ComponentTensors>> {
        let place = self.kept.iter().position(|kept| kept.id == *id)?;
        let used = self.kept.remove(place);
        let tensors = Arc::clone(&used.tensors);
        self.kept.push(used);
        Some(tensors)
    }

    /// Drops the least recently used components until `wanted` bytes fit within the bound; all of them if `wanted` exceeds it.
    fn make_room(&mut self, wanted: Bytes) {
        let mut bytes: Bytes = self.kept.iter().map(|kept| kept.bytes).sum();
        while !self.kept.is_empty() && bytes + wanted > self.bound {
            bytes -= self.kept.remove(0).bytes;
        }
    }

    /// Keeps a component, if there is room for it.
    fn keep(&mut self, component: &Component, tensors: &Arc<ComponentTensors>) {
        if component.bytes <= self.bound {
            self.kept.push(HostComponent {
                id: component.id.clone(),
                bytes: component.bytes,
                tensors: Arc::clone(tensors),
            });
        }
    }

    /// Drops everything.
    pub(super) fn clear(&mut self) {
        self.kept.clear();
    }
}

impl Card {
    /// The components that a rung leaves in the machine's memory, by name: read where they are not kept. Components that do not
    /// fit within the bound are held for the running stage only.
    pub(super) fn components_on_host(
        &mut self,
        run: &StageAttempt<'_>,
        rung: usize,
        link: &mut dyn Link,
    ) -> Result<Vec<(String, Arc<ComponentTensors>)>, MoveError> {
        let names = run.need.rungs().get(rung);
        let names = names.map_or(&[][..], |rung| &rung.from_host);
        let mut components = Vec::with_capacity(names.len());
        for name in names {
            let mut known = run.need.components.iter();
            let component = known.find(|component| component.name == *name);
            let component = component
                .ok_or_else(|| MoveError::Refused(format!("{name} is not among the stage's components")))?;
            let tensors = match self.on_host.get(&component.id) {
                Some(kept) => kept,
                None => self.read_on_host(run, component, link)?,
            };
            components.push((name.clone(), tensors));
        }
        Ok(components)
    }

    fn read_on_host(
        &mut self,
        run: &StageAttempt<'_>,
        component: &Component,
        link: &mut dyn Link,
    ) -> Result<Arc<ComponentTensors>, MoveError> {
        let name = &component.name;
        let plan = run.model.load_plan(name);
        let plan = plan.ok_or_else(|| MoveError::Model(format!("the model has no component {name}")))?;
        self.on_host.make_room(component.bytes);
        let read = self.gpu.read_on_host(plan, &mut |_| match run
            .stages
            .iter()
            .all(|(ticket, _)| link.cancelled(*ticket))
        {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        });
        let files = run.model.files_of(name);
        let tensors = Arc::new(read.map_err(|error| MoveError::of_read(error, name, &files))?);
        if !files.iter().all(ModelFile::is_current) {
            return Err(MoveError::replaced_while_read(name));
        }
        tracing::debug!(component = name, bytes = %component.bytes, "read into the machine's memory");
        self.on_host.keep(component, &tensors);
        Ok(tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn component(name: &str, bytes: u64) -> Component {
        Component {
            id: ComponentId::new(name),
            name: name.to_owned(),
            bytes: Bytes(bytes),
            reload_seconds: 0.0,
            parts: residency::Parts::default(),
        }
    }

    #[test]
    fn the_cache_drops_the_least_recently_used_and_keeps_none_above_its_bound() {
        let mut on_host = OnHost::new(Bytes(100));
        let tensors = Arc::new(ComponentTensors::default());
        let read = |on_host: &mut OnHost, name: &str, bytes: u64| {
            on_host.make_room(Bytes(bytes));
            on_host.keep(&component(name, bytes), &tensors);
        };
        let has = |on_host: &mut OnHost, name: &str| on_host.get(&ComponentId::new(name)).is_some();
        read(&mut on_host, "one", 40);
        read(&mut on_host, "two", 40);
        assert!(has(&mut on_host, "one"));
        read(&mut on_host, "three", 40);
        assert!(has(&mut on_host, "one") && !has(&mut on_host, "two") && has(&mut on_host, "three"));
        read(&mut on_host, "huge", 101);
        assert!(!has(&mut on_host, "huge") && on_host.kept.is_empty());
        read(&mut on_host, "one", 40);
        on_host.clear();
        assert!(!has(&mut on_host, "one"));
    }
}
