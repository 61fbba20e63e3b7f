//! Values that outlive the stage that made them: bounded, each with a time to live that use renews. Accounts share the bound (see
//! [`SharedStore`]).

use std::borrow::Cow;
use std::time::Duration;

use model::{HostTensor, HostType, ValueShape, Values};
use residency::Bytes;
use tokio::time::Instant;

use crate::error::{Error, Shortfall};
use crate::job::{JobId, Latent, LatentInfo, Reach};
use crate::queue::shared_bound::Exceeded;
use crate::queue::shared_store::{SharedStore, Stored, Taken};

/// Most latents, whatever their size.
const MOST_LATENTS: u64 = 4096;

/// The store. A leased latent, which a job needs, is never dropped.
pub(super) struct Latents {
    ttl: Duration,
    kept: SharedStore<StoredLatent>,
}

/// The job that has made a latent, and its account.
pub(super) struct Maker {
    pub(super) job: JobId,
    pub(super) account: String,
}

struct StoredLatent {
    values: Values,
    decoder_id: String,
    /// See [`JobOptions::account`](crate::job::JobOptions::account).
    account: String,
    /// None for a latent that a client has uploaded.
    made_by: Option<JobId>,
    last_used: Instant,
    leases: u32,
    /// Whether it stays when no job needs it any more.
    keep: bool,
    /// A client has released it: only the jobs that lease it can still use it.
    given_up: bool,
    /// See [`LatentInfo::approximation`].
    approximation: Option<Cow<'static, str>>,
}

impl Stored for StoredLatent {
    fn account(&self) -> &str {
        &self.account
    }

    fn bytes(&self) -> u64 {
        bytes_of(&self.values).0
    }

    fn last_used(&self) -> Instant {
        self.last_used
    }

    fn is_needed(&self) -> bool {
        self.leases > 0
    }
}

impl Latents {
    pub(super) fn new(bound: Bytes, ttl: Duration) -> Latents {
        Latents::bounded(bound, MOST_LATENTS, ttl)
    }

    fn bounded(bytes: Bytes, count: u64, ttl: Duration) -> Latents {
        Latents {
            ttl,
            kept: SharedStore::new(bytes.0, count),
        }
    }

    /// Stores the latent of a job, under a lease. It may exceed the bounds, so that sampling need not be repeated.
    pub(super) fn put_leased(
        &mut self,
        values: Values,
        decoder_id: String,
        maker: Maker,
        keep: bool,
        now: Instant,
    ) -> String {
        let more = Taken::one(bytes_of(&values).0);
        self.kept.make_room_if_possible(&maker.account, more);
        self.insert(StoredLatent {
            values,
            decoder_id,
            account: maker.account,
            made_by: Some(maker.job),
            last_used: now,
            leases: 1,
            keep,
            given_up: false,
            approximation: None,
        })
    }

    /// Stores a latent that a client uploads.
    pub(super) fn put(
        &mut self,
        values: Values,
        decoder_id: String,
        account: String,
        now: Instant,
    ) -> Result<LatentInfo, Error> {
        if decoder_id.trim().is_empty() {
            return Err(Error::LatentWithoutDecoder);
        }
        check_numbers(&values)?;
        let wanted = bytes_of(&values);
        let most = Bytes(self.kept.bytes.all);
        if wanted > most {
            let problem = format!(
                "the latent has {wanted}, more than the store can hold ({most}): raise queue.latents"
            );
            return Err(Error::LatentMismatch(problem));
        }
        self.check_leased(&account, wanted)?;
        if !self.kept.make_room(&account, Taken::one(wanted.0)) {
            return Err(Error::ClientLimit(format!(
                "a latent of {wanted} is more than the share of one client while others keep theirs: release some, try a smaller one, or \
                 raise queue.latents"
            )));
        }
        let id = self.insert(StoredLatent {
            values,
            decoder_id,
            account,
            made_by: None,
            last_used: now,
            leases: 0,
            keep: true,
            given_up: false,
            approximation: None,
        });
        self.info(&id, now)
    }

    /// Puts a latent back that was here before, with its id. One that is there already stays as it is.
    pub(super) fn restore(&mut self, latent: Latent, maker: Maker, now: Instant) -> Result<(), Error> {
        let Latent { info, values } = latent;
        if self.kept.get(&info.id).is_some() {
            return Ok(());
        }
        if !self
            .kept
            .make_room(&maker.account, Taken::one(bytes_of(&values).0))
        {
            return Err(Error::ClientLimit(format!(
                "there is no room for the latent {} of {} while others are needed: try again in a while, or raise queue.latents",
                info.id, info.bytes
            )));
        }
        let kept = StoredLatent {
            values,
            decoder_id: info.decoder_id,
            account: maker.account,
            made_by: Some(maker.job),
            last_used: now,
            leases: 0,
            keep: true,
            given_up: false,
            approximation: info.approximation,
        };
        self.kept.insert(info.id, kept);
        Ok(())
    }

    /// Marks a latent whose decode lacks something of its job's own result.
    pub(super) fn mark_approximate(&mut self, id: &str, approximation: Option<&'static str>) {
        self.kept
            .edit(id, |kept| kept.approximation = approximation.map(Cow::Borrowed));
    }

    /// Adds values to a latent that a job has made and leases.
    pub(super) fn extend_leased(&mut self, id: &str, values: Values) {
        let bytes = bytes_of(&values).0;
        let Some(account) = self.kept.get(id).map(|kept| kept.account.clone()) else {
            return;
        };
        self.kept
            .make_room_if_possible(&account, Taken { bytes, count: 0 });
        self.kept.edit(id, |kept| kept.values.extend(values));
    }

    /// Refuses a latent out of reach, in the words for one that is not there.
    pub(super) fn check(&self, id: &str, reach: &Reach) -> Result<(), Error> {
        let is_there = self.kept.get(id).is_some_and(|kept| reach.has(&kept.account));
        match is_there {
            true => Ok(()),
            false => Err(Error::LatentNotFound(id.to_owned())),
        }
    }

    /// A latent with its tensors. This renews its time to live.
    pub(super) fn get(&mut self, id: &str, now: Instant) -> Result<Latent, Error> {
        let values = self.edit_known(id, |kept| {
            kept.last_used = now;
            kept.values.clone()
        })?;
        Ok(Latent {
            info: self.info(id, now)?,
            values,
        })
    }

    /// The values for a job that leases them. They are there even if their client has released the latent.
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
            approximation: kept.approximation.clone(),
        })
    }

    pub(super) fn lease(&mut self, id: &str, now: Instant) -> Result<(), Error> {
        self.edit_known(id, |kept| {
            kept.leases += 1;
            kept.last_used = now;
        })
    }

    /// Releases a latent for a client: clients can no longer use it, and it is dropped when its last lease ends. False:
    /// there was none.
    pub(super) fn give_up(&mut self, id: &str) -> bool {
        let given_up = self.edit_known(id, |kept| {
            kept.given_up = true;
            kept.keep = false;
            kept.leases
        });
        if given_up == Ok(0) {
            self.kept.remove(id);
        }
        given_up.is_ok()
    }

    /// As [`Latents::give_up`], for all latents of a job that are within reach.
    pub(super) fn give_up_made_by(&mut self, job: &str, reach: &Reach) {
        let by_job = |kept: &StoredLatent| kept.made_by.as_deref() == Some(job) && reach.has(&kept.account);
        let made = self.kept.iter().filter(|(_, kept)| by_job(kept));
        let made: Vec<String> = made.map(|(id, _)| id.clone()).collect();
        for id in made {
            self.give_up(&id);
        }
    }

    fn edit_known<R>(&mut self, id: &str, edit: impl FnOnce(&mut StoredLatent) -> R) -> Result<R, Error> {
        let is_known = self.kept.get(id).is_some_and(|kept| !kept.given_up);
        let edited = is_known.then(|| self.kept.edit(id, edit)).flatten();
        edited.ok_or_else(|| Error::LatentNotFound(id.to_owned()))
    }

    /// Keeps a latent after its job: clients have received its id and may ask for it.
    pub(super) fn keep(&mut self, id: &str) {
        self.kept.edit(id, |kept| kept.keep = true);
    }

    /// Ends a lease. A latent whose id no client has is dropped with its last lease; others are dropped while the store
    /// exceeds its bound.
    pub(super) fn release(&mut self, id: &str, now: Instant) {
        let released = self.kept.edit(id, |kept| {
            kept.leases = kept.leases.saturating_sub(1);
            kept.last_used = now;
            (kept.account.clone(), kept.leases == 0 && !kept.keep)
        });
        let Some((account, is_unknown)) = released else {
            return;
        };
        if is_unknown {
            self.kept.remove(id);
        }
        self.kept.make_room_if_possible(&account, Taken::default());
    }

    /// Drops latents whose time to live has passed; true if there was any.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        self.kept.expire(self.ttl, now)
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.kept.next_expiry(self.ttl)
    }

    pub(super) fn leases(&self) -> usize {
        self.kept.iter().map(|(_, kept)| kept.leases as usize).sum()
    }

    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }

    pub(super) fn bytes(&self) -> Bytes {
        self.kept.iter().map(|(_, kept)| bytes_of(&kept.values)).sum()
    }

    /// Refuses an upload while jobs lease so many of the stored latents that dropping all others would not make room for it.
    fn check_leased(&self, account: &str, wanted: Bytes) -> Result<(), Error> {
        let (leased, own) = self.kept.needed(account);
        let (bytes, count) = (self.kept.bytes, self.kept.count);
        let has_bytes = bytes.check(leased.bytes, own.bytes, wanted.0.min(bytes.of_account()));
        let problem = match has_bytes.and_then(|()| count.check(leased.count, own.count, 1)) {
            Ok(()) => return Ok(()),
            Err(Exceeded::All) => {
                return Err(Error::MemoryTaken(Box::new(Shortfall {
                    stage: "the store of latents".into(),
                    needed: wanted,
                    free: Bytes(bytes.all.saturating_sub(leased.bytes)),
                    capacity: Bytes(bytes.all),
                    holders: Vec::new(),
                    fallbacks: Vec::new(),
                    smallest: None,
                    instead: None,
                    pinned: Bytes::ZERO,
                })));
            }
            Err(Exceeded::Account) => "jobs need all the latents that one client may have",
            Err(Exceeded::Kept) => {
                "jobs need all latents but for the last eighth, which is kept for clients whose latents no job needs"
            }
        };
        let remedy = "try again when some have ended, or raise queue.latents";
        Err(Error::ClientLimit(format!("{problem}: {remedy}")))
    }

    fn insert(&mut self, kept: StoredLatent) -> String {
        let id = format!("latent-{}", uuid::Uuid::new_v4().simple());
        self.kept.insert(id.clone(), kept);
        id
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
mod tests;
