//! Values that outlive the stage that made them: bounded, each with a time to live that use renews.

use std::collections::BTreeMap;
use std::time::Duration;

use model::{HostTensor, HostType, ValueShape, Values};
use residency::Bytes;
use tokio::time::Instant;

use crate::error::{Error, Shortfall};
use crate::job::{JobId, Latent, LatentInfo};

/// Latents that are kept, however small they are.
const MOST_LATENTS: usize = 4096;

/// The store. What is leased (a job needs it) is never dropped.
pub(super) struct Latents {
    bound: Bytes,
    ttl: Duration,
    kept: BTreeMap<String, StoredLatent>,
}

struct StoredLatent {
    values: Values,
    decoder_id: String,
    /// None for what a client has brought.
    made_by: Option<JobId>,
    last_used: Instant,
    leases: u32,
    /// Whether it stays when no job needs it any more.
    keep: bool,
    /// Given up by a client: there for the jobs that lease it, for nobody else.
    given_up: bool,
    /// See [`LatentInfo::approximation`].
    approximation: Option<&'static str>,
}

impl Latents {
    pub(super) fn new(bound: Bytes, ttl: Duration) -> Latents {
        Latents {
            bound,
            ttl,
            kept: BTreeMap::new(),
        }
    }

    /// Takes the latent of a job, under a lease. It may exceed the bound, so that sampling need not be repeated.
    pub(super) fn put_leased(
        &mut self,
        values: Values,
        decoder_id: String,
        made_by: JobId,
        keep: bool,
        now: Instant,
    ) -> String {
        self.make_room(bytes_of(&values));
        self.insert(StoredLatent {
            values,
            decoder_id,
            made_by: Some(made_by),
            last_used: now,
            leases: 1,
            keep,
            given_up: false,
            approximation: None,
        })
    }

    /// Takes what a client brings.
    pub(super) fn put(
        &mut self,
        values: Values,
        decoder_id: String,
        now: Instant,
    ) -> Result<LatentInfo, Error> {
        if decoder_id.trim().is_empty() {
            return Err(Error::LatentWithoutDecoder);
        }
        check_numbers(&values)?;
        let wanted = bytes_of(&values);
        if wanted > self.bound {
            let problem = format!("a latent of {wanted} exceeds the store of {}", self.bound);
            return Err(Error::LatentMismatch(problem));
        }
        let leased = self.leased_bytes();
        if leased + wanted > self.bound {
            return Err(Error::MemoryTaken(Box::new(Shortfall {
                stage: "the store of latents".into(),
                needed: wanted,
                free: Bytes(self.bound.0.saturating_sub(leased.0)),
                capacity: self.bound,
                holders: Vec::new(),
                fallbacks: Vec::new(),
                smallest: None,
                instead: None,
            })));
        }
        self.make_room(wanted);
        let id = self.insert(StoredLatent {
            values,
            decoder_id,
            made_by: None,
            last_used: now,
            leases: 0,
            keep: true,
            given_up: false,
            approximation: None,
        });
        self.info(&id, now)
    }

    /// What it is decoded to is not all that its job's own result is.
    pub(super) fn mark_approximate(&mut self, id: &str, approximation: Option<&'static str>) {
        if let Some(kept) = self.kept.get_mut(id) {
            kept.approximation = approximation;
        }
    }

    /// Adds to what a job has made and leases.
    pub(super) fn extend_leased(&mut self, id: &str, values: Values) {
        let more = values
            .values()
            .map(|tensor| Bytes(tensor.data.len() as u64))
            .sum();
        self.make_room(more);
        if let Some(kept) = self.kept.get_mut(id) {
            kept.values.extend(values);
        }
    }

    /// Its tensors; that is a use.
    pub(super) fn get(&mut self, id: &str, now: Instant) -> Result<Latent, Error> {
        let kept = self.known_mut(id)?;
        kept.last_used = now;
        let values = kept.values.clone();
        Ok(Latent {
            info: self.info(id, now)?,
            values,
        })
    }

    /// The values for a job that leases them: there, whatever clients have given up.
    pub(super) fn leased_values(&self, id: &str) -> Result<Values, Error> {
        let kept = self.kept.get(id).filter(|kept| kept.leases > 0);
        kept.map(|kept| kept.values.clone())
            .ok_or_else(|| Error::LatentNotFound(id.to_owned()))
    }

    pub(super) fn info(&self, id: &str, now: Instant) -> Result<LatentInfo, Error> {
        let kept = self.kept.get(id).filter(|kept| !kept.given_up);
        let kept = kept.ok_or_else(|| Error::LatentNotFound(id.to_owned()))?;
        Ok(LatentInfo {
            id: id.to_owned(),
            values: shapes_of(&kept.values),
            decoder_id: kept.decoder_id.clone(),
            expires_in: (kept.last_used + self.ttl).saturating_duration_since(now),
            bytes: bytes_of(&kept.values),
            approximation: kept.approximation,
        })
    }

    pub(super) fn lease(&mut self, id: &str, now: Instant) -> Result<(), Error> {
        let kept = self.known_mut(id)?;
        kept.leases += 1;
        kept.last_used = now;
        Ok(())
    }

    /// Gives up a latent for a client: no client finds it any more, and it is dropped when its last lease ends. False:
    /// there was none.
    pub(super) fn give_up(&mut self, id: &str) -> bool {
        let Ok(kept) = self.known_mut(id) else {
            return false;
        };
        kept.given_up = true;
        kept.keep = false;
        if kept.leases == 0 {
            self.kept.remove(id);
        }
        true
    }

    /// As [`Latents::give_up`], for all that a job has made.
    pub(super) fn give_up_made_by(&mut self, job: &str) {
        let by_job = |kept: &StoredLatent| kept.made_by.as_deref() == Some(job);
        let made = self.kept.iter().filter(|(_, kept)| by_job(kept));
        let made: Vec<String> = made.map(|(id, _)| id.clone()).collect();
        for id in made {
            self.give_up(&id);
        }
    }

    fn known_mut(&mut self, id: &str) -> Result<&mut StoredLatent, Error> {
        let kept = self.kept.get_mut(id).filter(|kept| !kept.given_up);
        kept.ok_or_else(|| Error::LatentNotFound(id.to_owned()))
    }

    /// Keeps a latent after its job: clients have received its id and may ask for it.
    pub(super) fn keep(&mut self, id: &str) {
        if let Some(kept) = self.kept.get_mut(id) {
            kept.keep = true;
        }
    }

    /// Ends a lease. A latent whose id no client has is dropped with its last lease; others are dropped while the store
    /// exceeds its bound.
    pub(super) fn release(&mut self, id: &str, now: Instant) {
        let Some(kept) = self.kept.get_mut(id) else { return };
        kept.leases = kept.leases.saturating_sub(1);
        kept.last_used = now;
        if kept.leases == 0 && !kept.keep {
            self.kept.remove(id);
        }
        self.make_room(Bytes::ZERO);
    }

    /// Drops latents whose time to live has passed; true if there was any.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let (ttl, before) = (self.ttl, self.kept.len());
        self.kept
            .retain(|_, kept| kept.leases > 0 || now < kept.last_used + ttl);
        before != self.kept.len()
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        let idle = self.kept.values().filter(|kept| kept.leases == 0);
        idle.map(|kept| kept.last_used + self.ttl).min()
    }

    pub(super) fn leases(&self) -> usize {
        self.kept.values().map(|kept| kept.leases as usize).sum()
    }

    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.kept.values().map(|kept| bytes_of(&kept.values)).sum()
    }

    fn leased_bytes(&self) -> Bytes {
        let leased = self.kept.values().filter(|kept| kept.leases > 0);
        leased.map(|kept| bytes_of(&kept.values)).sum()
    }

    fn insert(&mut self, kept: StoredLatent) -> String {
        let id = format!("latent-{}", uuid::Uuid::new_v4().simple());
        self.kept.insert(id.clone(), kept);
        id
    }

    fn make_room(&mut self, wanted: Bytes) {
        while self.bytes() + wanted > self.bound || self.kept.len() >= MOST_LATENTS {
            let idle = self.kept.iter().filter(|(_, kept)| kept.leases == 0);
            let Some(oldest) = idle
                .min_by_key(|(_, kept)| kept.last_used)
                .map(|(id, _)| id.clone())
            else {
                return;
            };
            self.kept.remove(&oldest);
        }
    }
}

fn bytes_of(values: &Values) -> Bytes {
    values
        .values()
        .map(|tensor| Bytes(tensor.data.len() as u64))
        .sum()
}

/// Names and shapes.
pub(super) fn shapes_of(values: &Values) -> Vec<ValueShape> {
    let shapes = values
        .iter()
        .map(|(name, tensor)| ValueShape::new(name, tensor.shape.clone()));
    shapes.collect()
}

fn check_numbers(values: &Values) -> Result<(), Error> {
    for HostTensor { dtype, shape, data } in values.values() {
        let width = match dtype {
            HostType::F32 => 4,
            HostType::F16 | HostType::Bf16 => 2,
        };
        let numbers = shape
            .iter()
            .try_fold(1_usize, |product, side| product.checked_mul(*side));
        let expected = numbers.and_then(|n| n.checked_mul(width));
        if shape.is_empty() || expected == Some(0) || expected != Some(data.len()) {
            let found = data.len();
            return Err(Error::LatentMismatch(format!(
                "a latent of shape {shape:?} does not have {found} bytes"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_shape(shape: Vec<usize>) -> Values {
        let bytes = 4 * shape.iter().product::<usize>();
        let tensor = HostTensor {
            dtype: HostType::F32,
            shape,
            data: vec![0; bytes].into(),
        };
        Values::from([("latent".to_owned(), tensor)])
    }

    fn tensor() -> Values {
        of_shape(vec![1, 1, 2, 2])
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_store_drops_the_oldest_latent_and_never_a_leased_one() {
        let mut latents = Latents::new(Bytes(40), Duration::from_secs(10));
        let put = |latents: &mut Latents| latents.put(tensor(), "vae".into(), Instant::now());
        let leased = latents.put_leased(tensor(), "vae".into(), "job".into(), true, Instant::now());
        let first = put(&mut latents).unwrap();
        tokio::time::advance(Duration::from_secs(1)).await;
        let second = put(&mut latents).unwrap();
        let now = Instant::now();
        assert!(latents.get(&first.id, now).is_err() && latents.get(&second.id, now).is_ok());
        let paid_for = latents.put_leased(tensor(), "vae".into(), "job".into(), false, now);
        assert!(latents.get(&leased, now).is_ok() && latents.get(&paid_for, now).is_ok());
        latents.lease(&paid_for, now).unwrap();
        latents.release(&paid_for, now);
        assert!(latents.get(&paid_for, now).is_ok(), "leased twice");
        latents.release(&paid_for, now);
        assert!(latents.get(&paid_for, now).is_err(), "nobody was told of it");
    }

    #[tokio::test(start_paused = true)]
    async fn a_latent_given_up_is_gone_for_clients_at_once_and_stays_until_its_jobs_end() {
        let mut latents = Latents::new(Bytes(40), Duration::from_secs(10));
        let now = Instant::now();
        let idle = latents.put(tensor(), "vae".into(), now).unwrap();
        assert!(latents.give_up(&idle.id));
        assert!(!latents.give_up(&idle.id), "there is none any more");
        assert_eq!(latents.len(), 0);

        let leased = latents.put_leased(tensor(), "vae".into(), "job".into(), true, now);
        assert!(latents.give_up(&leased));
        assert!(!latents.give_up(&leased), "once");
        assert!(latents.get(&leased, now).is_err() && latents.lease(&leased, now).is_err());
        assert!(latents.leased_values(&leased).is_ok(), "its job needs it");
        latents.release(&leased, now);
        assert!(latents.leased_values(&leased).is_err());
        assert_eq!(latents.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn each_use_renews_the_time_to_live_of_a_latent() {
        let mut latents = Latents::new(Bytes(40), Duration::from_secs(10));
        let info = latents.put(tensor(), "vae".into(), Instant::now()).unwrap();
        for _ in 0..3 {
            tokio::time::advance(Duration::from_secs(9)).await;
            latents.expire(Instant::now());
            assert!(latents.get(&info.id, Instant::now()).is_ok());
        }
        tokio::time::advance(Duration::from_secs(10)).await;
        latents.expire(Instant::now());
        assert_eq!(latents.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_full_of_leased_latents_refuses_clients_until_a_lease_ends() {
        let mut latents = Latents::new(Bytes(40), Duration::from_secs(10));
        let now = Instant::now();
        let lease = |_| latents.put_leased(tensor(), "vae".into(), "job".into(), true, now);
        let leased: Vec<String> = (0..3).map(lease).collect();
        let refused = latents.put(tensor(), "vae".into(), now);
        assert!(matches!(refused, Err(Error::MemoryTaken(short)) if short.free == Bytes::ZERO));
        assert_eq!(latents.bytes(), Bytes(48), "what was paid for stays");
        latents.release(&leased[0], now);
        assert_eq!(latents.bytes(), Bytes(32), "while it is needed");
        assert!(latents.get(&leased[0], now).is_err() && latents.get(&leased[1], now).is_ok());
        latents.release(&leased[1], now);
        assert_eq!(latents.bytes(), Bytes(32), "the store is within its bound");
        assert!(latents.put(tensor(), "vae".into(), now).is_ok());
        assert!(latents.get(&leased[1], now).is_err() && latents.get(&leased[2], now).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_latent_larger_than_the_store_is_a_mismatch_and_drops_no_other() {
        let mut latents = Latents::new(Bytes(40), Duration::from_secs(10));
        let now = Instant::now();
        let idle = latents.put(tensor(), "vae".into(), now).unwrap();
        let large = of_shape(vec![1, 1, 4, 4]);
        let refused = latents.put(large, "vae".into(), now);
        assert!(matches!(refused, Err(Error::LatentMismatch(_))));
        assert!(latents.get(&idle.id, now).is_ok());
    }

    #[test]
    fn the_store_bounds_the_number_of_latents_however_small_they_are() {
        let now = Instant::now();
        let mut latents = Latents::new(Bytes::gib(1), Duration::from_secs(600));
        let first = latents.put(tensor(), "a vae".into(), now).unwrap().id;
        for n in 1..=MOST_LATENTS as u64 {
            let later = now + Duration::from_millis(n);
            latents.put(tensor(), "a vae".into(), later).unwrap();
        }
        assert_eq!(latents.len(), MOST_LATENTS);
        assert!(latents.get(&first, now).is_err(), "the oldest has left");
    }
}
