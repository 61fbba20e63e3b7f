//! Values that outlive the stage that made them: bounded, each with a time to live that use renews. Accounts share the bound:
//! an account that stores many latents displaces its own, not those of others.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::{AddAssign, SubAssign};
use std::time::Duration;

use model::{HostTensor, HostType, ValueShape, Values};
use residency::Bytes;
use tokio::time::Instant;

use crate::error::{Error, Shortfall};
use crate::job::{JobId, Latent, LatentInfo};
use crate::queue::shared_bound::{Exceeded, SharedBound};

/// Most latents, whatever their size.
const MOST_LATENTS: u64 = 4096;

/// The store. A leased latent, which a job needs, is never dropped.
pub(super) struct Latents {
    bytes: SharedBound,
    count: SharedBound,
    ttl: Duration,
    kept: BTreeMap<String, StoredLatent>,
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
    approximation: Option<&'static str>,
}

/// Use of the bounds by some latents: number and bytes.
#[derive(Clone, Copy, Default)]
struct Taken {
    bytes: u64,
    count: u64,
}

impl AddAssign for Taken {
    fn add_assign(&mut self, more: Taken) {
        self.bytes += more.bytes;
        self.count += more.count;
    }
}

impl SubAssign for Taken {
    fn sub_assign(&mut self, less: Taken) {
        self.bytes -= less.bytes;
        self.count -= less.count;
    }
}

impl Latents {
    pub(super) fn new(bound: Bytes, ttl: Duration) -> Latents {
        Latents::bounded(bound, MOST_LATENTS, ttl)
    }

    fn bounded(bytes: Bytes, count: u64, ttl: Duration) -> Latents {
        Latents {
            bytes: SharedBound::new(bytes.0),
            count: SharedBound::new(count),
            ttl,
            kept: BTreeMap::new(),
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
        let bytes = bytes_of(&values).0;
        self.make_room(&maker.account, Taken { bytes, count: 1 });
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
        let most = Bytes(self.bytes.all);
        if wanted > most {
            let problem = format!(
                "the latent has {wanted}, more than the store can hold ({most}): raise queue.latents"
            );
            return Err(Error::LatentMismatch(problem));
        }
        self.check_leased(&account, wanted)?;
        let (bytes, count) = (wanted.0, 1);
        self.make_room(&account, Taken { bytes, count });
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

    /// Marks a latent whose decode lacks something of its job's own result.
    pub(super) fn mark_approximate(&mut self, id: &str, approximation: Option<&'static str>) {
        if let Some(kept) = self.kept.get_mut(id) {
            kept.approximation = approximation;
        }
    }

    /// Adds values to a latent that a job has made and leases.
    pub(super) fn extend_leased(&mut self, id: &str, values: Values) {
        let bytes = bytes_of(&values).0;
        let Some(account) = self.kept.get(id).map(|kept| kept.account.clone()) else {
            return;
        };
        self.make_room(&account, Taken { bytes, count: 0 });
        if let Some(kept) = self.kept.get_mut(id) {
            kept.values.extend(values);
        }
    }

    /// A latent with its tensors. This renews its time to live.
    pub(super) fn get(&mut self, id: &str, now: Instant) -> Result<Latent, Error> {
        let kept = self.known_mut(id)?;
        kept.last_used = now;
        let values = kept.values.clone();
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
            approximation: kept.approximation,
        })
    }

    pub(super) fn lease(&mut self, id: &str, now: Instant) -> Result<(), Error> {
        let kept = self.known_mut(id)?;
        kept.leases += 1;
        kept.last_used = now;
        Ok(())
    }

    /// Releases a latent for a client: clients can no longer use it, and it is dropped when its last lease ends. False:
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

    /// As [`Latents::give_up`], for all latents of a job.
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
        let account = kept.account.clone();
        if kept.leases == 0 && !kept.keep {
            self.kept.remove(id);
        }
        self.make_room(&account, Taken::default());
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

    /// Refuses an upload while jobs lease so many of the stored latents that dropping all others would not make room for it.
    fn check_leased(&self, account: &str, wanted: Bytes) -> Result<(), Error> {
        let leased = self.by_account(|kept| kept.leases > 0);
        let own = leased.get(account).map(|of| of.taken).unwrap_or_default();
        let leased = self.counted(&leased);
        let bytes = self
            .bytes
            .check(leased.bytes, own.bytes, wanted.0.min(self.bytes.of_account()));
        let problem = match bytes.and_then(|()| self.count.check(leased.count, own.count, 1)) {
            Ok(()) => return Ok(()),
            Err(Exceeded::All) => {
                return Err(Error::MemoryTaken(Box::new(Shortfall {
                    stage: "the store of latents".into(),
                    needed: wanted,
                    free: Bytes(self.bytes.all.saturating_sub(leased.bytes)),
                    capacity: Bytes(self.bytes.all),
                    holders: Vec::new(),
                    fallbacks: Vec::new(),
                    smallest: None,
                    instead: None,
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

    /// Groups the latents that match by account.
    fn by_account(&self, are_meant: impl Fn(&StoredLatent) -> bool) -> BTreeMap<&str, OfAccount<'_>> {
        let mut accounts: BTreeMap<&str, OfAccount<'_>> = BTreeMap::new();
        for (id, kept) in self.kept.iter().filter(|(_, kept)| are_meant(kept)) {
            let of = accounts.entry(&kept.account).or_default();
            of.taken += kept.taken();
            if kept.leases == 0 {
                of.idle.push(Reverse((kept.last_used, id)));
            }
        }
        accounts
    }

    /// The use of all accounts together. An account may exceed its part, by leased latents or by a single large one; that excess does
    /// not count here, so that it does not reduce the room of others.
    fn counted(&self, accounts: &BTreeMap<&str, OfAccount<'_>>) -> Taken {
        let mut counted = Taken::default();
        for of in accounts.values() {
            counted += Taken {
                bytes: of.taken.bytes.min(self.bytes.of_account()),
                count: of.taken.count.min(self.count.of_account()),
            };
        }
        counted
    }

    fn insert(&mut self, kept: StoredLatent) -> String {
        let id = format!("latent-{}", uuid::Uuid::new_v4().simple());
        self.kept.insert(id.clone(), kept);
        id
    }

    /// Drops latents that no job needs until the account can store `more`, as far as possible.
    fn make_room(&mut self, account: &str, more: Taken) {
        for id in self.in_the_way(account, more) {
            self.kept.remove(&id);
        }
    }

    /// The latents to drop so that `account` can store `more`: first its own oldest, until it is within the bound of one account (a
    /// single latent may be larger than that), then the oldest of the account that has most.
    fn in_the_way(&self, account: &str, more: Taken) -> Vec<String> {
        let mut accounts = self.by_account(|_| true);
        accounts.entry(account).or_default().taken += more;
        let (most_bytes, most_count) = (self.bytes.of_account(), self.count.of_account());
        let mut dropped = Vec::new();
        loop {
            let own = accounts.get(account).map_or(more, |of| of.taken);
            let all = self.counted(&accounts);
            let is_own = own.count > 1 && (own.bytes > most_bytes || own.count > most_count);
            let is_of_bytes = all.bytes > self.bytes.all;
            if !is_own && !is_of_bytes && all.count <= self.count.all {
                return dropped;
            }
            let amount = |of: Taken| match is_of_bytes {
                true => of.bytes,
                false => of.count,
            };
            let leaving = accounts
                .iter_mut()
                .filter(|(name, of)| !of.idle.is_empty() && (!is_own || **name == account))
                .max_by_key(|(_, of)| (amount(of.taken), of.idle.peek().copied()));
            let Some((_, of)) = leaving else {
                return dropped;
            };
            let Some(Reverse((_, id))) = of.idle.pop() else {
                return dropped;
            };
            if let Some(kept) = self.kept.get(id) {
                of.taken -= kept.taken();
            }
            dropped.push(id.clone());
        }
    }
}

/// The latents of an account.
#[derive(Default)]
struct OfAccount<'a> {
    taken: Taken,
    /// Latents that no job leases, the oldest on top.
    idle: BinaryHeap<Reverse<(Instant, &'a String)>>,
}

impl StoredLatent {
    fn taken(&self) -> Taken {
        Taken {
            bytes: bytes_of(&self.values).0,
            count: 1,
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
mod tests;
