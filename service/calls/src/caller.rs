//! The caller of a request: its client, and its deadline.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use access::{Holder, Role};
use config::RESERVED_NAMES;
use engine::Error;
use engine::job::{JobOptions, Priority, Reach};
use gpu::{CardDescription, CardKind};
use residency::Bytes;
use tokio::time::Instant;

use crate::budget::{Client, client_at, client_with, network_of};
use crate::errors::{invalid, short};

/// The shortest beginning of a UUID that stands for it: `GPU-` and four digits.
const SHORTEST_UUID: usize = 8;

/// Options of a job, as a client asks for them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AskedOptions {
    /// Name of the client; empty: its address.
    pub client_id: String,
    pub priority: Priority,
    /// For late or foreign memory; `None` for the service's setting.
    pub patience: Option<Duration>,
    /// Run a stage even if it may be short of memory.
    pub allow_low_memory: bool,
    /// Bytes of the card to keep free while it runs.
    pub headroom: Bytes,
    /// A preferred card: its id, the beginning of it, or `cuda:1`; empty for any.
    pub card: String,
    /// Jobs with the same key are one job; empty for none.
    pub idempotency_key: String,
    /// Continue without listeners, and past the deadline.
    pub detach: bool,
}

/// The caller of a request.
#[derive(Clone, Debug)]
pub struct Caller {
    address: Option<SocketAddr>,
    deadline: Option<Instant>,
    holder: Option<Arc<Holder>>,
    /// The trace that its jobs are a part of; empty: none.
    trace: String,
}

impl Caller {
    /// A caller at this address (`None`: a transport without addresses), whose request has this timeout, and whose token has this holder
    /// (`None`: no tokens are asked for).
    pub fn new(
        address: Option<SocketAddr>,
        timeout: Option<Duration>,
        holder: Option<Arc<Holder>>,
    ) -> Caller {
        Caller {
            address,
            holder,
            deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            trace: String::new(),
        }
    }

    /// The same caller, whose jobs are a part of this trace: `traceparent` of W3C Trace Context.
    pub fn in_trace(self, trace: String) -> Caller {
        Caller { trace, ..self }
    }

    /// The same caller, whose jobs have no deadline.
    pub(crate) fn without_deadline(self) -> Caller {
        Caller {
            deadline: None,
            ..self
        }
    }

    /// The client whose limits the call counts against: its token, without tokens its address.
    pub fn client(&self) -> Client {
        match &self.holder {
            Some(holder) => client_with(holder),
            None => self.address.and_then(client_at),
        }
    }

    /// Where the call comes from.
    pub(crate) fn network(&self) -> Option<IpAddr> {
        self.address.map(network_of)
    }

    /// The holder of its token.
    pub(crate) fn holder(&self) -> Option<&Holder> {
        self.holder.as_deref()
    }

    /// Whose latents, media and holds it may use: those of its token; everybody's where there are no tokens.
    pub(crate) fn reach(&self) -> Reach {
        match &self.holder {
            Some(_) => Reach::Own(self.account()),
            None => Reach::All,
        }
    }

    /// Whose jobs it may cancel: those of its token, and as an administrator everybody's.
    pub(crate) fn reach_of_jobs(&self) -> Reach {
        match self.holder() {
            Some(holder) if holder.role < Role::Administer => self.reach(),
            _ => Reach::All,
        }
    }

    /// The account to which jobs and latents belong, and by which they are bounded: its token; without tokens its address, not the name
    /// that it gives itself. Empty without either.
    pub(crate) fn account(&self) -> String {
        if let Some(holder) = &self.holder {
            return account_of_token(&holder.name);
        }
        self.network()
            .map(|address| address.to_string())
            .unwrap_or_default()
    }

    /// Whether the caller is on the machine of the service, or connects through a program there.
    pub(crate) fn is_on_this_machine(&self) -> bool {
        self.address
            .is_some_and(|address| address.ip().to_canonical().is_loopback())
    }

    /// The client's name: `client_id`, or its address where that is empty.
    ///
    /// # Errors
    /// When the name is too long, or has control characters.
    pub fn name(&self, client_id: String) -> Result<String, Error> {
        short("client_id", &client_id)?;
        if client_id.starts_with(RESERVED_NAMES) {
            return Err(invalid(
                "client_id",
                format!("begins with {RESERVED_NAMES:?}, as the holders of sessions do: give another name"),
            ));
        }
        if !client_id.is_empty() {
            tracing::Span::current().record("client", &client_id);
            return Ok(client_id);
        }
        Ok(self
            .address
            .map_or_else(|| "unknown".to_owned(), |address| address.ip().to_string()))
    }

    /// The options of a job in the queue of a service with these cards.
    ///
    /// # Errors
    /// When a name in the options is too long, or that of no card.
    pub(crate) fn options(
        &self,
        options: Option<AskedOptions>,
        cards: &[CardDescription],
    ) -> Result<JobOptions, Error> {
        let options = options.unwrap_or_default();
        let card_hint = card_named("options.card", &options.card, cards)?;
        short("options.idempotency_key", &options.idempotency_key)?;
        Ok(JobOptions {
            id: None,
            client: self.name(options.client_id)?,
            account: self.account(),
            reach: self.reach(),
            most_jobs: self.holder().and_then(|holder| holder.allowance.jobs),
            priority: options.priority,
            patience: options.patience,
            allow_low_memory: options.allow_low_memory,
            headroom: options.headroom,
            card_hint,
            idempotency_key: options.idempotency_key,
            detach: options.detach,
            deadline: self.deadline,
            trace: self.trace.clone(),
        })
    }
}

/// The account of a token, by its name.
pub fn account_of_token(name: &str) -> String {
    format!("token {name:?}")
}

/// Whether an account is that of a token.
pub fn is_of_token(account: &str) -> bool {
    account.starts_with("token \"")
}

#[cfg(test)]
impl Caller {
    /// A caller at an address, without a deadline.
    pub(crate) fn at(address: Option<&str>) -> Caller {
        Caller {
            address: address.map(|address| address.parse().unwrap()),
            deadline: None,
            holder: None,
            trace: String::new(),
        }
    }
}

/// The id of the card that a client names: by its id, by the beginning of it (eight characters of a UUID at least), or as
/// `cuda:1` by its place among the service's NVIDIA cards. Empty for none.
///
/// # Errors
/// When there is no such card, or several.
pub(crate) fn card_named(field: &str, name: &str, cards: &[CardDescription]) -> Result<String, Error> {
    short(field, name)?;
    if name.is_empty() || cards.iter().any(|card| card.id == name) {
        return Ok(name.to_owned());
    }
    let nvidia = || cards.iter().filter(|card| card.kind == CardKind::Cuda);
    let place = name
        .strip_prefix("cuda:")
        .and_then(|place| place.parse::<usize>().ok());
    let by_place = place.and_then(|place| nvidia().nth(place));
    let begins = |card: &&CardDescription| name.len() >= SHORTEST_UUID && card.id.starts_with(name);
    let mut by_beginning = nvidia().filter(begins);
    let found = match (by_place, by_beginning.next(), by_beginning.next()) {
        (Some(card), ..) | (None, Some(card), None) => Some(card),
        _ => None,
    };
    found.map(|card| card.id.clone()).ok_or_else(|| {
        let mut number = 0..;
        let names = cards.iter().map(|card| match card.kind {
            CardKind::Cuda => format!("cuda:{} ({})", number.next().unwrap_or_default(), card.id),
            _ => card.id.clone(),
        });
        let there_are = names.collect::<Vec<_>>().join(", ");
        invalid(field, format!("is {name:?}; this service has {there_are}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_named_by_its_id_its_beginning_or_its_place() {
        let card = |id: &str, kind| CardDescription {
            id: id.to_owned(),
            kind,
            name: String::new(),
            total: Bytes::ZERO,
            compute_capability: None,
            compute_dtype: "bf16".to_owned(),
            peers: gpu::Peers::none(),
        };
        let cards = [
            card("cpu", CardKind::Cpu),
            card("GPU-1234-aaaa", CardKind::Cuda),
            card("GPU-1234-bbbb", CardKind::Cuda),
        ];
        let named = |name: &str| card_named("options.card", name, &cards);
        for (name, id) in [
            ("", ""),
            ("cpu", "cpu"),
            ("cuda:0", "GPU-1234-aaaa"),
            ("cuda:1", "GPU-1234-bbbb"),
            ("GPU-1234-b", "GPU-1234-bbbb"),
        ] {
            assert_eq!(named(name).unwrap(), id, "{name}");
        }
        for wrong in ["cuda:2", "cuda:9", "GPU-1234-", "GPU", "cuda", "sim:0", "cuda:-1"] {
            let refused = named(wrong).unwrap_err().to_string();
            assert!(refused.contains("cuda:1 (GPU-1234-bbbb)"), "{refused}");
        }
    }

    #[test]
    fn what_belongs_to_a_token_is_out_of_reach_for_another() {
        let of = |name: &str, role| {
            let holder = Holder {
                name: name.to_owned(),
                role,
                allowance: Default::default(),
            };
            Caller::new(None, None, Some(Arc::new(holder)))
        };
        let alice = of("alice", Role::Generate);
        for (other, has, has_jobs) in [
            (&alice, true, true),
            (&of("bob", Role::Generate), false, false),
            (&of("alice\" \"bob", Role::Generate), false, false),
            (&of("root", Role::Administer), false, true),
            (&Caller::at(None), true, true),
        ] {
            assert_eq!(other.reach().has(&alice.account()), has, "{other:?}");
            assert_eq!(other.reach_of_jobs().has(&alice.account()), has_jobs, "{other:?}");
        }
        let elsewhere = Caller::new("10.0.0.1:1".parse().ok(), None, alice.holder.clone());
        assert_eq!(alice.client(), elsewhere.client(), "from whichever address");
        assert_ne!(alice.client(), of("bob", Role::Generate).client());
        let address = Caller::at(Some("10.0.0.1:1"));
        assert_ne!(address.client(), elsewhere.client());
        assert!(!of("10.0.0.1", Role::Generate).reach().has(&address.account()));
    }

    #[test]
    fn a_caller_of_a_loopback_address_is_on_this_machine() {
        for here in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert!(Caller::at(Some(here)).is_on_this_machine(), "{here}");
        }
        for other in [
            Some("10.0.0.1:1"),
            Some("[::ffff:10.0.0.1]:1"),
            Some("[2001:db8::1]:1"),
            None,
        ] {
            assert!(!Caller::at(other).is_on_this_machine(), "{other:?}");
        }
    }
}
