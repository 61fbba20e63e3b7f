//! A store that accounts share, bounded in bytes and in number. An account that stores many values displaces its own, not those of
//! others: nobody loses a value for others while he has no more than an equal share, and whoever has more takes nothing from others.

use std::collections::btree_set::Iter;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::{AddAssign, SubAssign};
use std::time::Duration;

use tokio::time::Instant;

use super::shared_bound::SharedBound;

/// A value of an account.
pub(super) trait Stored {
    /// See [`JobOptions::account`](crate::job::JobOptions::account).
    fn account(&self) -> &str;
    fn bytes(&self) -> u64;
    fn last_used(&self) -> Instant;
    /// Whether it is needed: then it is never dropped.
    fn is_needed(&self) -> bool;
}

/// Use of the bounds by some values: number and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) bytes: u64,
    pub(super) count: u64,
}

impl Taken {
    /// A single value.
    pub(super) fn one(bytes: u64) -> Taken {
        Taken { bytes, count: 1 }
    }

    /// Whether it is more than a limit in either.
    fn exceeds(self, limit: Taken) -> bool {
        self.bytes > limit.bytes || self.count > limit.count
    }

    /// In each the lesser of both.
    fn min(self, other: Taken) -> Taken {
        Taken {
            bytes: self.bytes.min(other.bytes),
            count: self.count.min(other.count),
        }
    }
}

impl AddAssign for Taken {
    fn add_assign(&mut self, more: Taken) {
        self.bytes = self.bytes.saturating_add(more.bytes);
        self.count = self.count.saturating_add(more.count);
    }
}

impl SubAssign for Taken {
    fn sub_assign(&mut self, less: Taken) {
        self.bytes = self.bytes.saturating_sub(less.bytes);
        self.count = self.count.saturating_sub(less.count);
    }
}

/// Values by id, with their sums by account.
pub(super) struct SharedStore<V> {
    pub(super) bytes: SharedBound,
    pub(super) count: SharedBound,
    stored: BTreeMap<String, V>,
    accounts: BTreeMap<String, OfAccount>,
    /// The sum of all accounts. An account may exceed its part, by values that are needed or by a single large one: that excess
    /// does not count here, so that it does not reduce the room of others.
    counted: Taken,
    /// The same sum of the values that are needed.
    needed: Taken,
}

/// The values of an account. It has one at least.
#[derive(Default)]
struct OfAccount {
    taken: Taken,
    needed: Taken,
    /// Values that are not needed, the one that was used least recently first.
    idle: BTreeSet<(Instant, String)>,
}

/// What is dropped to make room, and whether it suffices.
struct Leaving {
    ids: Vec<String>,
    suffices: bool,
}

impl<V: Stored> SharedStore<V> {
    pub(super) fn new(bytes: u64, count: u64) -> SharedStore<V> {
        SharedStore {
            bytes: SharedBound::new(bytes),
            count: SharedBound::new(count),
            stored: BTreeMap::new(),
            accounts: BTreeMap::new(),
            counted: Taken::default(),
            needed: Taken::default(),
        }
    }

    pub(super) fn get(&self, id: &str) -> Option<&V> {
        self.stored.get(id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&String, &V)> {
        self.stored.iter()
    }

    pub(super) fn len(&self) -> usize {
        self.stored.len()
    }

    /// Stores a value, also beyond the bounds. One with the same id leaves.
    pub(super) fn insert(&mut self, id: String, value: V) {
        self.remove(&id);
        self.count_in(&id, &value);
        self.stored.insert(id, value);
    }

    pub(super) fn remove(&mut self, id: &str) -> Option<V> {
        let value = self.stored.remove(id)?;
        self.count_out(id, &value);
        Some(value)
    }

    /// Changes a value, but not its account.
    pub(super) fn edit<R>(&mut self, id: &str, edit: impl FnOnce(&mut V) -> R) -> Option<R> {
        let (id, mut value) = self.stored.remove_entry(id)?;
        self.count_out(&id, &value);
        let result = edit(&mut value);
        self.count_in(&id, &value);
        self.stored.insert(id, value);
        Some(result)
    }

    /// Drops values that have not been used for so long and are not needed; true if there was any.
    pub(super) fn expire(&mut self, unused_for: Duration, now: Instant) -> bool {
        let mut expired = Vec::new();
        for of in self.accounts.values() {
            let idle = of.idle.iter();
            let over = idle.take_while(|(used, _)| *used + unused_for <= now);
            expired.extend(over.map(|(_, id)| id.clone()));
        }
        for id in &expired {
            self.remove(id);
        }
        !expired.is_empty()
    }

    /// When the next value will not have been used for so long.
    pub(super) fn next_expiry(&self, unused_for: Duration) -> Option<Instant> {
        let oldest = self.accounts.values().filter_map(|of| of.idle.first());
        oldest.map(|(used, _)| *used + unused_for).min()
    }

    /// The sums of the values that are needed: of all accounts and of one.
    pub(super) fn needed(&self, account: &str) -> (Taken, Taken) {
        let own = self.accounts.get(account);
        (self.needed, own.map(|of| of.needed).unwrap_or_default())
    }

    /// Drops values that are not needed until the account can store `more`; false, and nothing is dropped, where that cannot be.
    pub(super) fn make_room(&mut self, account: &str, more: Taken) -> bool {
        let Leaving { ids, suffices } = self.leaving(account, more);
        if suffices {
            self.remove_all(&ids);
        }
        suffices
    }

    /// As [`SharedStore::make_room`], as far as possible.
    pub(super) fn make_room_if_possible(&mut self, account: &str, more: Taken) {
        let leaving = self.leaving(account, more);
        self.remove_all(&leaving.ids);
    }

    fn remove_all(&mut self, ids: &[String]) {
        for id in ids {
            self.remove(id);
        }
    }

    /// The values to drop so that `account` can store `more`. Its own leave, oldest first, until it is within the bound of one account
    /// (a single value may be larger than that). If the store is full, an account with more than an equal share makes room itself;
    /// for one with less, the account that has most beyond its share does, and if there is none, its own leave too.
    fn leaving(&self, account: &str, more: Taken) -> Leaving {
        let (all, most) = (self.of_all(), self.of_account());
        let mut changed: HashMap<&str, Rest<'_>> = HashMap::new();
        let others = self.accounts.keys().filter(|name| *name != account).count() as u64;
        let share = self.equal_share(1 + others);
        let own_before = self.accounts.get(account);
        let mut counted = self.counted;
        counted -= own_before.map(|of| of.taken).unwrap_or_default().min(most);
        let mut own = Rest::of(own_before);
        own.taken += more;
        let mut ids = Vec::new();
        let ends = |ids, suffices| Leaving { ids, suffices };
        loop {
            let mut sum = counted;
            sum += own.taken.min(most);
            let is_beyond_its_bound = own.taken.count > 1 && own.taken.exceeds(most);
            let is_full = sum.exceeds(all);
            if !is_beyond_its_bound && !is_full {
                return ends(ids, true);
            }
            let amount = |of: Taken| match sum.bytes > all.bytes {
                true => (of.bytes, share.bytes),
                false => (of.count, share.count),
            };
            let is_beyond = |of: Taken| amount(of).0 > amount(of).1;
            if is_full && !is_beyond_its_bound && !is_beyond(own.taken) {
                let of_others = self.accounts.iter().filter(|(name, _)| *name != account);
                let rests = of_others.map(|(name, of)| {
                    let rest = changed.get(name.as_str()).cloned();
                    (name.as_str(), rest.unwrap_or_else(|| Rest::of(Some(of))))
                });
                let largest = rests
                    .filter(|(_, rest)| is_beyond(rest.taken) && rest.has_idle())
                    .max_by_key(|(_, rest)| amount(rest.taken).0);
                if let Some((name, mut rest)) = largest {
                    counted -= rest.taken.min(most);
                    ids.extend(self.drop_oldest(&mut rest));
                    counted += rest.taken.min(most);
                    changed.insert(name, rest);
                    continue;
                }
            }
            match self.drop_oldest(&mut own) {
                Some(id) => ids.push(id),
                None => return ends(ids, false),
            }
        }
    }

    fn drop_oldest(&self, rest: &mut Rest<'_>) -> Option<String> {
        let (_, id) = rest.idle.next()?;
        if let Some(value) = self.stored.get(id) {
            rest.taken -= Taken::one(value.bytes());
        }
        Some(id.clone())
    }

    fn of_all(&self) -> Taken {
        Taken {
            bytes: self.bytes.all,
            count: self.count.all,
        }
    }

    fn of_account(&self) -> Taken {
        Taken {
            bytes: self.bytes.of_account(),
            count: self.count.of_account(),
        }
    }

    /// The share of each of so many accounts.
    fn equal_share(&self, accounts: u64) -> Taken {
        let of_all = Taken {
            bytes: self.bytes.all / accounts.max(1),
            count: self.count.all / accounts.max(1),
        };
        of_all.min(self.of_account())
    }

    fn count_in(&mut self, id: &str, value: &V) {
        let taken = Taken::one(value.bytes());
        self.change(value.account(), |of| {
            of.taken += taken;
            match value.is_needed() {
                true => of.needed += taken,
                false => drop(of.idle.insert((value.last_used(), id.to_owned()))),
            }
        });
    }

    fn count_out(&mut self, id: &str, value: &V) {
        let taken = Taken::one(value.bytes());
        self.change(value.account(), |of| {
            of.taken -= taken;
            match value.is_needed() {
                true => of.needed -= taken,
                false => drop(of.idle.remove(&(value.last_used(), id.to_owned()))),
            }
        });
    }

    fn change(&mut self, account: &str, change: impl FnOnce(&mut OfAccount)) {
        let most = self.of_account();
        let of = self.accounts.entry(account.to_owned()).or_default();
        self.counted -= of.taken.min(most);
        self.needed -= of.needed.min(most);
        change(of);
        self.counted += of.taken.min(most);
        self.needed += of.needed.min(most);
        if of.taken.count == 0 {
            self.accounts.remove(account);
        }
    }
}

/// What is left of an account's values while it is decided which are dropped.
#[derive(Clone, Default)]
struct Rest<'a> {
    taken: Taken,
    /// The idle ones that are left.
    idle: Iter<'a, (Instant, String)>,
}

impl<'a> Rest<'a> {
    fn of(account: Option<&'a OfAccount>) -> Rest<'a> {
        Rest {
            taken: account.map(|of| of.taken).unwrap_or_default(),
            idle: account.map(|of| of.idle.iter()).unwrap_or_default(),
        }
    }

    fn has_idle(&self) -> bool {
        self.idle.len() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Value {
        account: &'static str,
        bytes: u64,
        used: Instant,
    }

    impl Stored for Value {
        fn account(&self) -> &str {
            self.account
        }

        fn bytes(&self) -> u64 {
            self.bytes
        }

        fn last_used(&self) -> Instant {
            self.used
        }

        fn is_needed(&self) -> bool {
            false
        }
    }

    struct Bench {
        store: SharedStore<Value>,
        next: u64,
        began: Instant,
    }

    impl Bench {
        fn new(bytes: u64) -> Bench {
            Bench {
                store: SharedStore::new(bytes, 1000),
                next: 0,
                began: Instant::now(),
            }
        }

        fn put(&mut self, account: &'static str, bytes: u64) -> bool {
            self.next += 1;
            let fits = self.store.make_room(account, Taken::one(bytes));
            if fits {
                let used = self.began + Duration::from_millis(self.next);
                let value = Value { account, bytes, used };
                self.store.insert(format!("{:04}", self.next), value);
            }
            fits
        }

        fn bytes_of(&self, account: &str) -> u64 {
            let own = self.store.iter().filter(|(_, value)| value.account == account);
            own.map(|(_, value)| value.bytes).sum()
        }
    }

    #[test]
    fn several_small_accounts_leave_a_large_one_its_equal_share() {
        let mut bench = Bench::new(800);
        while bench.bytes_of("large") < 700 {
            assert!(bench.put("large", 10));
        }
        for _ in 0..100 {
            for small in ["a", "b", "c"] {
                assert!(bench.put(small, 10));
            }
        }
        assert_eq!(bench.bytes_of("large"), 200, "one of four");
        assert_eq!(bench.bytes_of("a"), 200);
    }

    #[test]
    fn one_large_value_of_a_newcomer_displaces_nothing_of_others() {
        let mut bench = Bench::new(800);
        assert!(bench.put("third", 10));
        while bench.bytes_of("first") < 600 {
            assert!(bench.put("first", 10));
        }
        assert!(!bench.put("second", 300), "it is more than an equal share");
        assert_eq!(bench.bytes_of("first"), 600);
        assert!(bench.put("second", 200));
        assert_eq!((bench.bytes_of("first"), bench.bytes_of("third")), (590, 10));
    }

    #[test]
    fn who_has_more_than_an_equal_share_makes_room_for_who_has_less() {
        let mut bench = Bench::new(800);
        while bench.bytes_of("large") < 500 {
            assert!(bench.put("large", 50));
        }
        for _ in 0..20 {
            assert!(bench.put("other", 30));
        }
        assert_eq!((bench.bytes_of("large"), bench.bytes_of("other")), (400, 390));
    }
}
