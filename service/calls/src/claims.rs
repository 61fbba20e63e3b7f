//! Bounds on the number of holds and reservations of a client. Each has a name and a time to live.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use engine::Error;
use tokio::time::Instant;

/// The claims of one kind.
pub(crate) struct Claims {
    /// Plural noun of the kind, in messages and in the name of its setting.
    what: &'static str,
    most_per_client: usize,
    /// By account: by token, without tokens by address.
    made: Mutex<HashMap<String, HashMap<String, Made>>>,
}

struct Made {
    /// Empty until it is granted.
    id: String,
    until: Instant,
}

impl Claims {
    pub(crate) fn new(what: &'static str, most_per_client: usize) -> Claims {
        Claims {
            what,
            most_per_client,
            made: Mutex::default(),
        }
    }

    /// Counts a claim before it is granted. The same `key` again is the same claim, renewed.
    pub(crate) fn begin(&self, account: String, key: String, ttl: Duration) -> Result<Claim<'_>, Error> {
        let now = Instant::now();
        let mut made = self.lock();
        made.retain(|_, own| {
            own.retain(|_, each| each.until > now);
            !own.is_empty()
        });
        let own = made.entry(account.clone()).or_default();
        let known = own.get(&key).map(|each| (each.id.clone(), each.until));
        if known.is_none() && own.len() >= self.most_per_client {
            let (what, most) = (self.what, self.most_per_client);
            return Err(Error::ClientLimit(format!(
                "this client has {most} {what}, which are the most: release some, or raise limits.{what}_per_client"
            )));
        }
        let (id, _) = known.clone().unwrap_or((String::new(), now));
        let until = now + ttl;
        own.insert(key.clone(), Made { id, until });
        Ok(Claim {
            claims: self,
            account,
            key,
            until,
            known,
            is_granted: false,
        })
    }

    /// The key that a granted claim was counted by; the id itself where no claim has it.
    pub(crate) fn key_of(&self, id: &str) -> String {
        let made = self.lock();
        let mut all = made.values().flatten();
        let found = all.find(|(_, each)| each.id == id);
        found.map_or_else(|| id.to_owned(), |(key, _)| key.clone())
    }

    /// Removes a released claim.
    pub(crate) fn end(&self, id: &str) {
        if id.is_empty() {
            return; // claims that are not granted yet have an empty id
        }
        let mut made = self.lock();
        for own in made.values_mut() {
            own.retain(|_, each| each.id != id);
        }
        made.retain(|_, own| !own.is_empty());
    }

    /// A panic while it is locked leaves at most one claim too many or too few.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, HashMap<String, Made>>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A requested claim. Dropping it without a grant restores the state before the request.
pub(crate) struct Claim<'a> {
    claims: &'a Claims,
    account: String,
    key: String,
    until: Instant,
    /// The earlier claim of this key, with an empty id where it was not granted yet.
    known: Option<(String, Instant)>,
    is_granted: bool,
}

impl Claim<'_> {
    pub(crate) fn granted(mut self, id: &str) {
        let made = Made {
            id: id.to_owned(),
            until: self.until,
        };
        let mut all = self.claims.lock();
        // The entry may be missing if another request of this key has failed meanwhile.
        let own = all.entry(self.account.clone()).or_default();
        own.insert(self.key.clone(), made);
        self.is_granted = true;
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.is_granted {
            return;
        }
        let mut made = self.claims.lock();
        let Some(own) = made.get_mut(&self.account) else {
            return;
        };
        let known = self.known.take().unwrap_or((String::new(), self.until));
        // A claim that was granted to another request of this key since then stays.
        if own.get(&self.key).is_some_and(|each| each.id == known.0) {
            let (id, until) = known;
            match id.is_empty() {
                true => own.remove(&self.key),
                false => own.insert(std::mem::take(&mut self.key), Made { id, until }),
            };
        }
        if own.is_empty() {
            made.remove(&self.account);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(60);

    fn claim(claims: &Claims, key: &str) -> bool {
        match claims.begin(String::new(), key.to_owned(), TTL) {
            Ok(claim) => {
                claim.granted(&format!("id of {key}"));
                true
            }
            Err(_) => false,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn claims_are_bounded_by_client_and_end_by_release_or_expiry() {
        let claims = Claims::new("holds", 2);
        assert!(claim(&claims, "a") && claim(&claims, "b"));
        let refusal = claims
            .begin(String::new(), "c".to_owned(), TTL)
            .err()
            .map(|refusal| refusal.to_string());
        assert!(refusal.is_some_and(|refusal| refusal.contains("limits.holds_per_client")));
        assert!(claim(&claims, "a"), "a renewal is not another claim");
        claims.end("id of b");
        assert!(claim(&claims, "c"), "one was released");
        assert!(!claim(&claims, "d"));
        tokio::time::advance(TTL).await;
        assert!(
            claim(&claims, "d") && claim(&claims, "e"),
            "the others have expired"
        );
        let neighbour = "token \"bob\"".to_owned();
        assert!(claims.begin(neighbour, "a".to_owned(), TTL).is_ok());
    }

    #[tokio::test]
    async fn claims_that_are_not_granted_do_not_count() {
        let claims = Claims::new("holds", 1);
        drop(claims.begin(String::new(), "a".to_owned(), TTL));
        assert!(claim(&claims, "b"));
        drop(claims.begin(String::new(), "b".to_owned(), TTL)); // a renewal that fails leaves what there was
        assert!(!claim(&claims, "c"));
    }

    #[tokio::test(start_paused = true)]
    async fn of_two_requests_with_one_key_only_the_granted_one_counts() {
        for the_first_fails in [false, true] {
            let claims = Claims::new("holds", 1);
            let first = claims.begin(String::new(), "a".to_owned(), TTL).unwrap();
            let second = claims.begin(String::new(), "a".to_owned(), TTL).unwrap();
            let (failed, granted) = match the_first_fails {
                true => (first, second),
                false => (second, first),
            };
            match the_first_fails {
                true => {
                    drop(failed);
                    granted.granted("id");
                }
                false => {
                    granted.granted("id");
                    drop(failed);
                }
            }
            assert_eq!(claims.key_of("id"), "a");
            assert!(!claim(&claims, "b"), "it counts");
            claims.end("id");
            assert!(claims.lock().is_empty());
            assert!(claim(&claims, "b"));
        }
    }
}
