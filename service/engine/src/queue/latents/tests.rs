use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

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

const ME: &str = "10.0.0.1";

fn of(account: &str) -> Maker {
    Maker {
        job: "job".into(),
        account: account.to_owned(),
    }
}

fn of_me() -> Maker {
    of(ME)
}

fn taken(latents: &Latents, are_meant: impl Fn(&StoredLatent) -> bool) -> Taken {
    let mut all = Taken::default();
    for (_, kept) in latents.kept.iter().filter(|(_, kept)| are_meant(kept)) {
        all += Taken::one(kept.bytes());
    }
    all
}

fn tensor() -> Values {
    of_shape(vec![1, 1, 2, 2])
}

#[tokio::test(start_paused = true)]
async fn a_full_store_drops_the_oldest_latent_and_never_a_leased_one() {
    let mut latents = Latents::new(Bytes(40), Duration::from_secs(10));
    let put = |latents: &mut Latents| latents.put(tensor(), "vae".into(), ME.into(), Instant::now());
    let leased = latents.put_leased(tensor(), "vae".into(), of_me(), true, Instant::now());
    let first = put(&mut latents).unwrap();
    tokio::time::advance(Duration::from_secs(1)).await;
    let second = put(&mut latents).unwrap();
    let now = Instant::now();
    assert!(latents.get(&first.id, now).is_err() && latents.get(&second.id, now).is_ok());
    let paid_for = latents.put_leased(tensor(), "vae".into(), of_me(), false, now);
    assert!(latents.get(&leased, now).is_ok() && latents.get(&paid_for, now).is_ok());
    latents.lease(&paid_for, now).unwrap();
    latents.release(&paid_for, now);
    assert!(latents.get(&paid_for, now).is_ok(), "leased twice");
    latents.release(&paid_for, now);
    assert!(latents.get(&paid_for, now).is_err(), "nobody was told of it");
}

#[tokio::test(start_paused = true)]
async fn a_released_latent_is_gone_for_clients_at_once_and_stays_until_its_jobs_end() {
    let mut latents = Latents::new(Bytes(40), Duration::from_secs(10));
    let now = Instant::now();
    let idle = latents.put(tensor(), "vae".into(), ME.into(), now).unwrap();
    assert!(latents.give_up(&idle.id));
    assert!(!latents.give_up(&idle.id), "there is none any more");
    assert_eq!(latents.len(), 0);

    let leased = latents.put_leased(tensor(), "vae".into(), of_me(), true, now);
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
    let info = latents
        .put(tensor(), "vae".into(), ME.into(), Instant::now())
        .unwrap();
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
    let lease = |_| latents.put_leased(tensor(), "vae".into(), of_me(), true, now);
    let leased: Vec<String> = (0..3).map(lease).collect();
    let refused = latents.put(tensor(), "vae".into(), ME.into(), now);
    assert!(matches!(refused, Err(Error::MemoryTaken(short)) if short.free < short.needed));
    assert_eq!(latents.bytes(), Bytes(48), "what was paid for stays");
    latents.release(&leased[0], now);
    assert_eq!(latents.bytes(), Bytes(32), "while it is needed");
    assert!(latents.get(&leased[0], now).is_err() && latents.get(&leased[1], now).is_ok());
    latents.release(&leased[1], now);
    assert_eq!(latents.bytes(), Bytes(32), "the store is within its bound");
    assert!(latents.put(tensor(), "vae".into(), ME.into(), now).is_ok());
    assert!(latents.get(&leased[1], now).is_err() && latents.get(&leased[2], now).is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_latent_larger_than_the_store_is_a_mismatch_and_drops_no_other() {
    let mut latents = Latents::new(Bytes(40), Duration::from_secs(10));
    let now = Instant::now();
    let idle = latents.put(tensor(), "vae".into(), ME.into(), now).unwrap();
    let large = of_shape(vec![1, 1, 4, 4]);
    let refused = latents.put(large, "vae".into(), ME.into(), now);
    assert!(matches!(refused, Err(Error::LatentMismatch(_))));
    assert!(latents.get(&idle.id, now).is_ok());
    let of_all = of_shape(vec![10]);
    let alone = latents.put(of_all, "vae".into(), ME.into(), now).unwrap();
    assert!(
        latents.get(&alone.id, now).is_ok(),
        "a single one may fill the store"
    );
    assert!(latents.get(&idle.id, now).is_err());
}

#[test]
fn a_client_that_keeps_many_small_latents_drops_its_own_and_not_those_of_others() {
    let now = Instant::now();
    let mut latents = Latents::new(Bytes::gib(1), Duration::from_secs(600));
    let mut put = |account: &str, n: u64| {
        let later = now + Duration::from_millis(n);
        latents
            .put(tensor(), "a vae".into(), account.into(), later)
            .unwrap()
            .id
    };
    let of_another = put("10.0.0.2", 0);
    let first = put(ME, 1);
    for n in 2..=MOST_LATENTS + 200 {
        put(ME, n);
    }
    let (most, last) = (MOST_LATENTS / 8 * 7, MOST_LATENTS / 8);
    let kept_last: Vec<String> = (0..last)
        .map(|n| put("10.0.0.3", MOST_LATENTS + 300 + n))
        .collect();
    assert_eq!(latents.len() as u64, MOST_LATENTS);
    assert_eq!(
        taken(&latents, |kept| kept.account == ME).count,
        most - 1,
        "who has most makes room"
    );
    for id in kept_last.iter().chain([&of_another]) {
        assert!(latents.get(id, now).is_ok());
    }
    assert!(latents.get(&first, now).is_err(), "its own oldest has left");
}

#[test]
fn latents_that_jobs_of_one_client_need_leave_the_last_eighth_to_others() {
    let now = Instant::now();
    for needed in [14, 30] {
        let mut latents = Latents::new(Bytes(16 * 16), Duration::from_secs(10));
        let put = |latents: &mut Latents, account: &str| {
            let put = latents.put(tensor(), "vae".into(), account.into(), now);
            put.map(|info| info.id)
        };
        let first = put(&mut latents, "10.0.0.2").unwrap();
        for _ in 0..needed {
            latents.put_leased(tensor(), "vae".into(), of_me(), true, now);
        }
        let refused = put(&mut latents, ME);
        let Err(Error::ClientLimit(said)) = refused else {
            panic!("{needed}: {refused:?}");
        };
        assert!(
            said.contains("one client may have") && said.contains("queue.latents"),
            "{said}"
        );
        put(&mut latents, "10.0.0.3").unwrap();
        assert!(latents.get(&first, now).is_ok(), "{needed}");
        put(&mut latents, "10.0.0.3").unwrap(); // in place of its own, which is of an address with as many
        assert!(latents.get(&first, now).is_ok(), "{needed}");
    }
}

/// Whatever one client does, another that has no more than an eighth of the room loses nothing, and the store keeps to its
/// bounds but for what jobs need.
#[test]
fn no_client_displaces_latents_of_another_within_an_eighth_of_the_room() {
    const COUNT: u64 = 24;
    const BYTES: u64 = 64 * 24;
    for seed in 0..200 {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut latents = Latents::bounded(Bytes(BYTES), COUNT, Duration::from_secs(600));
        let (mut now, mut leased, mut modest) = (Instant::now(), Vec::new(), Vec::new());
        for _ in 0..150 {
            now += Duration::from_millis(random.random_range(0..3));
            let values = of_shape(vec![random.random_range(1..=40)]);
            match random.random_range(0..6) {
                0 | 1 => drop(latents.put(values, "vae".into(), ME.into(), now)),
                2 => leased.push(latents.put_leased(values, "vae".into(), of_me(), true, now)),
                3 if !leased.is_empty() => {
                    let id = leased.swap_remove(random.random_range(0..leased.len()));
                    latents.release(&id, now);
                }
                4 if !leased.is_empty() => {
                    let more = Values::from([(format!("{now:?}"), values["latent"].clone())]);
                    latents.extend_leased(&leased[random.random_range(0..leased.len())], more);
                }
                _ if modest.len() < 3 => {
                    let small = of_shape(vec![random.random_range(1..=16)]);
                    let put = latents.put(small, "vae".into(), "10.0.0.2".into(), now);
                    modest.push(put.unwrap_or_else(|refused| panic!("seed {seed}: {refused}")).id);
                }
                _ => {
                    let id = modest.remove(0);
                    assert!(latents.give_up(&id), "seed {seed}: it was dropped");
                }
            }
            for id in &modest {
                assert!(latents.info(id, now).is_ok(), "seed {seed}: {id} was dropped");
            }
            let all = taken(&latents, |_| true);
            let needed = taken(&latents, |kept| kept.leases > 0);
            let modest = taken(&latents, |kept| kept.account != ME);
            assert!(
                all.bytes <= BYTES.max(needed.bytes + modest.bytes),
                "seed {seed}: {} B",
                all.bytes
            );
            assert!(
                all.count <= COUNT.max(needed.count + modest.count),
                "seed {seed}: {}",
                all.count
            );
        }
    }
}
