//! Messages of ranks over NCCL, in builds with that feature.

use kvsieve::ranks::{RankError, nccl, threads};

/// Where there are two GPUs, messages arrive; where NCCL or a GPU is missing, all ranks say so and none waits.
#[test]
fn messages_arrive_or_a_line_says_what_is_missing() {
    let result = threads::run(2, |known| {
        let comm = nccl::over(known, known.rank())?;
        let (mine, mut theirs) = ([comm.rank() as u8 + 1; 100_000], [0; 100_000]);
        comm.transfer(&[(comm.next(), &mine)], &mut [(comm.previous(), &mut theirs)])?;
        comm.barrier()?;
        assert!(theirs.iter().all(|&byte| byte == comm.previous() as u8 + 1));
        Ok::<_, RankError>(comm.take_traffic().sent_bytes)
    });
    match result {
        Ok(sent_bytes) => assert_eq!(sent_bytes, [100_000; 2]),
        Err(error) => {
            let said = error.to_string();
            assert!(said.contains("NCCL") && said.lines().count() == 1, "{said}");
        }
    }
}
