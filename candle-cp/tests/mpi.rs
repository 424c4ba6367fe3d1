fn main() {
    let comm = candle_cp::comm::mpi::connect(&Default::default()).unwrap();
    let x = candle_core::Tensor::new(&[comm.rank() as f32, 1.0], &candle_core::Device::Cpu).unwrap();
    println!("{:?}", comm.all_reduce_sum(&x).unwrap().to_vec1::<f32>().unwrap());
    let sub = comm.split(comm.rank() % 2).unwrap();
    println!("{:?}", sub.all_reduce_sum(&x).unwrap().to_vec1::<f32>().unwrap());
}
